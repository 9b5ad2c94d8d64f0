"""Optimizers: foreach, fused, capturable and compiled steps, and optimizer state in lower precision.

Gradient scaling belongs to `accelcheck.techniques.precision`, and gradient exchange to `accelcheck.techniques.distributed`.
"""
