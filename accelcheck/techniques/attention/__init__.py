"""Attention kernels: SDPA backends, FlashAttention packages, FlexAttention, nested tensors."""
