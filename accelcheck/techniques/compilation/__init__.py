"""Compilers and graph capture: ``torch.compile`` and what surrounds it, export, AOTInductor, TorchScript.

Machinery that several of them use is here too; runtimes that are not torch's are in `accelcheck.techniques.runtimes`.
"""
