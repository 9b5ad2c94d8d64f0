"""Attention kernels: SDPA, FlashAttention, FlexAttention, nested tensors. Workloads of attention are not here."""
