"""Less memory for the same result: checkpointing, offload, in-place operations. Strides are in `layout`."""
