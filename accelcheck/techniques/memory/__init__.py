"""Less memory for the same result: activation checkpointing, offload, in-place operations, and the peaks that prove it.

Where tensors lie in memory and how they are strided belongs in `accelcheck.techniques.layout`.
"""
