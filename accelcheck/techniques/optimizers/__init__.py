"""Optimizers: foreach, fused, capturable and compiled steps, and optimizer state in lower precision.

Gradient scaling is in `accelcheck.techniques.precision`, and gradient exchange in `accelcheck.techniques.distributed`.
"""
