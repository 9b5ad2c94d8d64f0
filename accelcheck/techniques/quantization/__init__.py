"""Quantization: int8, int4 and float8 layers, pt2e, quantization-aware training, and the FP64 emulation as oracle.

The quantized modes of other runtimes are in `accelcheck.techniques.runtimes`; they use the emulation from this package.
"""
