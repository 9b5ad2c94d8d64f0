"""Parameters of awkward sizes, trained with the optimizers that no other family uses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal

if TYPE_CHECKING:
    from accelcheck.workloads.base import OptimizerMaker

SIZES = ((), (7,), (16,), (33,), (5, 13), (120,))
"""Shapes of the parameters: a scalar, less than a vector register, several registers, and several with a rest."""


class Bank(nn.Module):
    """``sin(x * scales)``, each parameter holding the scales of its own columns: ``(B, 242)`` to the same, no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in SIZES])

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.cat([weight.reshape(-1) for weight in self.weights])
        return torch.sin(x * scales)


def _bank(generator: torch.Generator, extent: int, *, optimizer: OptimizerMaker) -> Problem:
    module = Bank()
    with torch.no_grad():
        for weight in module.weights:
            weight.copy_(1.0 + 0.3 * normal(generator, *weight.shape))
    shape = (12 + extent, sum(weight.numel() for weight in module.weights))
    # Gradients of about 1 for each element: squares do not underflow, and are large compared with eps.
    return Problem(module, (normal(generator, *shape),), normal(generator, *shape), _squares, optimizer)


def _squares(out: Tensor, target: Tensor) -> Tensor:
    """Sum of squared errors per sample, averaged over samples; summed in FP32 or wider, as there are thousands."""
    wide = torch.promote_types(out.dtype, torch.float32)
    total = functional.mse_loss(out.to(wide), target.to(wide), reduction="sum") / len(out)
    return total.to(out.dtype)


def _workload(name: str, summary: str, optimizer: OptimizerMaker) -> Workload:
    return Workload(
        f"train-{name}",
        summary,
        partial(_bank, optimizer=optimizer),
        3,
        frozenset({Mode.TRAIN}),
        frozenset({"resizable", "scriptable", "training"}),
        # With parameters in FP16, squared gradients are subnormal.
        frozenset({"float32", "bfloat16"}),
    )


# Larger eps, as in train-transformer: otherwise the rounding error of a gradient near 0 decides the sign of a step. The
# decay rates are exact in FP32: optimizers with their step count in a tensor compute 1 - 0.999**t in FP32, which
# cancels, as workloads with the usual rates show.
_EPS, _BETAS = 1e-3, (0.875, 0.96875)

WORKLOADS = (
    _workload("amsgrad", "Four steps of Adam in its AMSGrad variant with decay, on parameters of awkward sizes.",
        partial(torch.optim.Adam, lr=1e-2, eps=_EPS, betas=_BETAS, amsgrad=True, weight_decay=0.1)),
    _workload("nadam", "Four steps of NAdam, on parameters of awkward sizes.",
        partial(torch.optim.NAdam, lr=1e-2, eps=_EPS, betas=_BETAS)),
    # Not centred: gradients change little between steps, so that the variance would cancel. A larger eps, since the
    # first step is that of a gradient ten times as large.
    _workload("rmsprop", "Four steps of RMSprop with momentum, on parameters of awkward sizes.",
        partial(torch.optim.RMSprop, lr=1e-2, eps=100 * _EPS, momentum=0.9)),
    _workload("adagrad", "Four steps of Adagrad with a falling rate, on parameters of awkward sizes.",
        partial(torch.optim.Adagrad, lr=1e-2, eps=_EPS, lr_decay=0.1)),
    _workload("nesterov", "Four steps of SGD with Nesterov momentum and decay, on parameters of awkward sizes.",
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
)  # fmt: skip
