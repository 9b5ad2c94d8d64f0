"""Quantization: int8, int4 and float8 layers, pt2e, quantization-aware training, and the FP64 emulation as oracle."""
