"""Measurement of time and memory: clocks, paired statistics, baselines, kernel launches, timing processes.

Judging results belongs in `accelcheck.verify`; nothing here knows a technique.
"""
