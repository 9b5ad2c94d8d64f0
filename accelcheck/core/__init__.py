"""What every other package shares: plain typed records (case, capability, registry, matrix, journal), files and child processes.

Nothing here imports torch or another package of accelcheck, except for annotations.
"""
