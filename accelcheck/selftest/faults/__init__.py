"""Faults that verdicts must catch, and correct variants that they must pass: one module a family, each with its `FAULTS` or `VARIANTS`.

A plant changes a technique's program or result in one named way; how plants are run and counted belongs in the runner above.
"""
