"""Checks of a compute platform: each item is tried, and judged by exact arithmetic or the FP64 oracle.

Slow is not wrong: the time beside the host's CPU is a measurement, which `accelcheck.report.assessment` counts.
"""
