"""A function with a surrogate gradient, which is not its derivative, as in quantization-aware training."""

from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, normal


class StraightThroughRound(torch.autograd.Function):
    """Rounds to the nearest integer, with the gradient of the identity (a straight-through estimator) instead of 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (grad,) = grads
        out: Tensor = grad
        return out


class Rounded(nn.Module):
    """``round(x * weight)``: ``x (N, F)``, ``weight (F,)``. TorchScript has no custom autograd functions."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = StraightThroughRound.apply(x * self.weight)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


def _rounded(generator: torch.Generator, extent: int) -> Problem:
    module = Rounded(12)
    with torch.no_grad():
        module.weight.copy_(2.0 ** integers(generator, -1, 2, 12))
    # Products are below 0.4 in magnitude, far from a tie: rounding errors change no output.
    return Problem(module, (0.2 * torch.tanh(normal(generator, 16 + extent, 12)),))


WORKLOADS = (
    Workload("straight-through",
        "Rounding with the gradient of the identity; differentiating the operators instead would give zeros.",
        _rounded, 3, traits=frozenset({"resizable"})),
)  # fmt: skip
