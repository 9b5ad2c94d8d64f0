"""Attention kernels: SDPA backends, FlashAttention packages, FlexAttention, nested tensors.

Attention as a workload is in `accelcheck.workloads.attention`.
"""
