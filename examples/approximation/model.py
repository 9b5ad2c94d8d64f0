"""A small model with linear layers and a GELU."""

import torch
from torch import nn


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, (8, 32)."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)), (torch.randn(8, 32),)
