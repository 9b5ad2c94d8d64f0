"""Less memory for the same result: activation checkpointing, offload, in-place operations, and their memory peaks."""
