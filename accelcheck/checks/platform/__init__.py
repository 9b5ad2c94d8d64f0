"""The check of a compute platform: each item is tried, and its values are held against exact arithmetic or the FP64 oracle.

What is slow is not wrong: a time beside the host's CPU is a measurement here, and `accelcheck.report.assessment` counts it.
"""
