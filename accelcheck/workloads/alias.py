"""Shared memory: views of a value returned together with the detached value, and a layer under two names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal


class DetachedBeside(nn.Module):
    """The two halves of ``sin(x * weight)``, which have gradients, and the whole value, detached.

    Models return a loss and its detached value for logging in the same way. The detached output must not remove the gradients
    of outputs that share its memory.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sin(x * self.weight)
        half = y.size(0) // 2
        return y[:half], y[half:], y.detach()


class ScaleShift(nn.Module):
    """``x * weight + bias``, both (width,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Shared(nn.Module):
    """One `ScaleShift` before and after a sine, registered under two names: the gradients of both uses are summed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before = ScaleShift(width)
        self.after = self.before

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(torch.sin(self.before(x)))
        return out


def _detached(generator: torch.Generator, extent: int) -> Problem:
    module = DetachedBeside()
    initialise(module, generator)
    return Problem(module, (normal(generator, 24 + extent, 32),))


def _shared(generator: torch.Generator, extent: int) -> Problem:
    module = Shared()
    initialise(module, generator)
    return Problem(module, (normal(generator, 24 + extent, 32),))


_TRAITS = frozenset({"scriptable", "resizable"})

WORKLOADS = (
    Workload(
        "detached-beside",
        "Views of a value as outputs, together with the detached value.",
        _detached,
        2,
        traits=_TRAITS,
    ),
    Workload(
        "shared-layer", "A layer that is registered under two names and called twice.", _shared, 2, traits=_TRAITS
    ),
)
