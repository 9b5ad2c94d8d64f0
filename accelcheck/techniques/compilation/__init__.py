"""Compilers and graph capture: ``torch.compile`` and what surrounds it, export, AOTInductor, TorchScript."""
