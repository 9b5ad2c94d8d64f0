"""The selftest: plants faults and correct variants in the matrix and counts what the verdicts make of them.

The plants are in `faults`; nothing outside of this package imports it, except for the command that runs it.
"""
