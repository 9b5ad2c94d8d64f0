"""Operators with gradients of their own, as extensions write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal


class GatedFunction(torch.autograd.Function):
    """``x sigmoid(slope gate)``: ``x`` and ``gate`` of one shape, ``slope`` 0-d; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, slope)
        return x * torch.sigmoid(slope * gate)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        x, gate, slope = ctx.saved_tensors
        open_ = torch.sigmoid(slope * gate)
        inner = grad * x * open_ * (1 - open_)
        return grad * open_, inner * slope, (inner * gate).sum()


class Gated(nn.Module):
    """`GatedFunction` with a learned slope. Not scriptable: TorchScript knows no custom functions."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = GatedFunction.apply(x, gate, self.slope)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


def _gated(generator: torch.Generator, extent: int) -> Problem:
    module = Gated()
    with torch.no_grad():
        module.slope.copy_(1.5 + 0.1 * normal(generator))
    return Problem(module, (normal(generator, 16 + extent, 12), normal(generator, 16 + extent, 12)))


WORKLOADS = (
    Workload(
        "custom-function",
        "A custom autograd function of two inputs of one shape and a parameter, which are told apart by gradients.",
        _gated,
        2,
        traits=frozenset({"resizable", "custom-function", "twice-differentiable"}),
    ),
)
