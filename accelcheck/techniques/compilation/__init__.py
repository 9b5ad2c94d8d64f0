"""Compilers and graph capture: ``torch.compile`` and what surrounds it, export, AOTInductor, TorchScript.

Code that several of them share is here too. Runtimes of other projects are in `accelcheck.techniques.runtimes`.
"""
