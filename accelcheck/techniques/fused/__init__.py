"""Fused kernels of large models: grouped products of experts, losses of a vocabulary's head, kernels of users.

Attention's are in `accelcheck.techniques.attention`.
"""
