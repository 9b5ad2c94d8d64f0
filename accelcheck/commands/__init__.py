"""Commands of ``accelcheck``, one file each, listed there as `COMMANDS`.

A command reads arguments and prints; computation belongs in `accelcheck.experiments`, `accelcheck.measure` or
`accelcheck.report`.
"""
