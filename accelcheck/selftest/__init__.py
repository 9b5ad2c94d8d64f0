"""The selftest: plants faults and correct variants in the matrix, and counts right and wrong verdicts.

The plants are in `faults`; only the command that runs the selftest imports this package.
"""
