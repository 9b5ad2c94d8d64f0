"""Fused kernels: grouped products of experts, losses of a vocabulary, Liger's. Attention's are in `attention`."""
