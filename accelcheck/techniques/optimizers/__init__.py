"""Optimizers: foreach, fused, capturable and compiled steps, and optimizer state in lower precision."""
