"""The commands of ``accelcheck``, one file each; each lists what it adds as `COMMANDS`.

A command reads arguments and prints: what it computes belongs in `accelcheck.experiments`, `accelcheck.measure` or `accelcheck.report`.
"""
