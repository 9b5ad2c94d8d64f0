"""Optimizers: foreach, fused and compiled steps, state in lower precision. Gradient scaling is in `precision`."""
