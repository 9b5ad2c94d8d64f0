"""Checks of a compute platform: each item is tried, and judged by exact arithmetic or the FP64 oracle.

Slowness is no fault: the time beside the host's CPU is a measurement, which `accelcheck.report.assessment` counts.
"""
