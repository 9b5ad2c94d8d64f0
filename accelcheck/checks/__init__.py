"""Checks, which find the verdict of a case; `execute` chooses one by the case's mode.

Tensors are judged by `accelcheck.verify`, and time and memory are measured by `accelcheck.measure`.
"""
