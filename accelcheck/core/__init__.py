"""Plain typed records that every other package shares: case, capability, registry, matrix, journal, units.

Nothing here imports torch or another package of accelcheck, except for annotations.
"""
