"""Exchange of tensors with other array libraries: NumPy, JAX and CuPy, through DLPack, also between streams.

Whole models that another runtime executes are in `accelcheck.techniques.runtimes`.
"""
