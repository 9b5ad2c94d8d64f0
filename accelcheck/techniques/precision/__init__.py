"""Lower floating-point precision that torch itself offers: autocast, precision policies, TF32.

Formats that need scales of their own, float8 among them, are in `accelcheck.techniques.quantization`.
"""
