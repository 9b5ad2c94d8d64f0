"""Exchange of tensors with other array libraries: NumPy, JAX and CuPy, through DLPack, also between streams."""
