"""Exchange of tensors with NumPy, JAX and CuPy through DLPack. Runtimes of whole models are in `runtimes`."""
