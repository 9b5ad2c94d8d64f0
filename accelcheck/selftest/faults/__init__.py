"""Faults that verdicts must catch, and correct variants that they must pass: a module per family lists them.

A plant changes a technique's program or result in one named way; `accelcheck.selftest.runner` runs and counts plants.
"""
