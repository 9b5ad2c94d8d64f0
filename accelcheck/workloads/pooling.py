"""Mean and maximum over padded sequences of different lengths, and the mean over windows of an image."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, lengths, normal, orders


def valid(x: Tensor, lengths: Tensor) -> Tensor:
    """Bool mask ``(B, S, 1)`` of ``x (B, S, F)`` without padding."""
    return (torch.arange(x.size(1), device=x.device) < lengths.unsqueeze(-1)).unsqueeze(-1)


class MeanPool(nn.Module):
    """The mean of ``tanh(linear(x))`` over the first ``lengths (B,)`` steps: ``(B, S, features)`` to ``(B, width)``."""

    def __init__(self, features: int = 24, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        total = hidden.masked_fill(~valid(x, lengths), 0.0).sum(1)
        return total / lengths.unsqueeze(-1)


class MaxPool(nn.Module):
    """A linear layer of the maximum over the first ``lengths (B,)`` steps: ``(B, S, features)`` to ``(B, width)``."""

    def __init__(self, features: int = 24, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.linear(x.masked_fill(~valid(x, lengths), float("-inf")).amax(1))
        return out


class AveragePool(nn.Module):
    """The mean over 3x3 windows with stride 2, padding excluded: ``(N, C, H, W)``."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=False)


def _average(generator: torch.Generator, extent: int) -> Problem:
    # Values far from 0, so that padding counted as values changes the mean.
    return Problem(AveragePool(), (1.0 + 0.25 * normal(generator, 2, 4, 9 + extent, 11),))


def _mean(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(MeanPool(), generator)
    steps = 12 + extent
    return Problem(module, (normal(generator, 6, steps, 24), lengths(generator, 6, 1, steps)))


def _max(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(MaxPool(), generator)
    steps = 12 + extent
    # A grid, permuted for each sequence and feature, so that no two steps are equal, not even in bfloat16.
    grid = 0.25 * (orders(generator, 6, 24, steps).mT - steps / 2)
    x = grid + 0.05 * torch.rand(6, steps, 24, generator=generator)
    held = lengths(generator, 6, 1, steps)
    # Padding is larger than all values: if it leaks, it becomes the maximum.
    return Problem(module, (torch.where(valid(x, held), x, x + 8.0), held))


_TRAITS = frozenset({"matmul", "linear", "scriptable", "resizable"})

_PROBES = frozenset({"nan[0]", "zeros", "ones"})

WORKLOADS = (
    Workload("mean-pool", "The mean over padded sequences, with their lengths in a tensor.",
        _mean, 2, traits=_TRAITS, probes=_PROBES),
    # PJRT's CPU client accumulates half precision in half precision.
    Workload("average-pool", "The mean over windows that extend over the edge, padding excluded.",
        _average, 3, traits=_TRAITS - {"matmul", "linear"}, dtypes=frozenset({"float32"}), probes=_PROBES | {"scaled"}),
    Workload("max-pool", "The maximum over padded sequences, with their lengths in a tensor.",
        _max, 2, traits=_TRAITS, probes=_PROBES),
)  # fmt: skip
