"""Commands of ``accelcheck``, one file each, whose function `add` declares it.

A command reads arguments and prints; computation belongs in `accelcheck.experiments`, `accelcheck.measure` or
`accelcheck.report`.
"""
