"""Quantization: int8, int4, float8, pt2e, QAT, and its FP64 emulation. Other runtimes are in `runtimes`."""
