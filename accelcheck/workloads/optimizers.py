"""Parameters of awkward sizes, trained with the optimizers that no other family uses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import OptimizerMaker, Problem, Workload
from accelcheck.workloads.draw import normal

SIZES = ((), (7,), (16,), (33,), (5, 13), (120,), (13, 5))
"""Shapes of the parameters: a scalar, less than a vector register, several registers, and several with a rest."""
FURTHER = ((2,),) * 105
"""Shapes of further parameters: kernels for lists of tensors take up to 110 of them at a time."""
TURNED = (13, 5)
"""Shape of the parameter whose columns lie in a row in memory."""


class Bank(nn.Module):
    """``sin(x * scales)``, each parameter holding the scales of its own columns: ``(B, n)`` to the same, no sums."""

    def __init__(self, *further: tuple[int, ...]) -> None:
        super().__init__()
        empty = [torch.empty(shape) for shape in (*SIZES, *further)]
        self.weights = nn.ParameterList([nn.Parameter(x.mT.contiguous().mT if x.shape == TURNED else x) for x in empty])

    def forward(self, x: Tensor) -> Tensor:
        scales = torch.cat([weight.reshape(-1) for weight in self.weights])
        return torch.sin(x * scales)


def _bank(generator: torch.Generator, extent: int, *, optimizer: OptimizerMaker, many: bool) -> Problem:
    module = Bank(*FURTHER if many else ())
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


def _workload(name: str, summary: str, optimizer: OptimizerMaker, *, many: bool = False) -> Workload:
    return Workload(
        f"train-{name}",
        summary,
        partial(_bank, optimizer=optimizer, many=many),
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

OPTIONS: tuple[tuple[str, Callable[..., torch.optim.Optimizer], str, dict[str, Any]], ...] = (
    ("dampened", torch.optim.SGD, "dampened", {"momentum": 0.9, "dampening": 0.5}),
    ("sgd", torch.optim.SGD, "without momentum", {"weight_decay": 0.1}),
    ("adam-decayed", torch.optim.Adam, "with decay in the gradient",
        {"eps": _EPS, "betas": _BETAS, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, "with AMSGrad", {"eps": _EPS, "betas": _BETAS, "amsgrad": True}),
    ("adagrad-decayed", torch.optim.Adagrad, "with decay and a first sum",
        {"eps": _EPS, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("nadam-decoupled", torch.optim.NAdam, "with decoupled decay",
        {"eps": _EPS, "betas": _BETAS, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("adadelta", torch.optim.Adadelta, "with decay", {"rho": 0.875, "eps": _EPS, "weight_decay": 0.1}),
    ("adamax", torch.optim.Adamax, "with decay", {"betas": _BETAS, "eps": _EPS, "weight_decay": 0.1}),
    ("asgd", torch.optim.ASGD, "averaged from the second step", {"t0": 1, "weight_decay": 0.1}),
)  # fmt: skip
"""Options of optimizers: name, class, words for its summary, and arguments besides the rate."""
MANY = frozenset({"dampened", "sgd", "adam-decayed"})
"""Names of those with `FURTHER` parameters."""

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
    *(
        _workload(name, f"Four steps of {getattr(kind, '__name__', name)}, {words}, on parameters of awkward sizes.",
            partial(kind, lr=1e-2, **options), many=name in MANY)
        for name, kind, words, options in OPTIONS
    ),
)  # fmt: skip
