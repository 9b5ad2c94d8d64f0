"""Compilers and graph capture: ``torch.compile``, export, AOTInductor, TorchScript. Runtimes are in `runtimes`."""
