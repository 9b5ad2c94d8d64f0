"""Fused kernels of large models: grouped products of experts, losses of a vocabulary's head."""
