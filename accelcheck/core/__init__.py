"""Plain typed records (case, fault, capability, journal), registry, files and child processes, for all other packages.

Nothing here imports torch or another package of accelcheck, except for annotations.
"""
