"""Tensors that cross into other array libraries: NumPy, JAX and CuPy, by DLPack and over streams.

Whole models that another runtime executes are in `accelcheck.techniques.runtimes`.
"""
