"""Second and third derivatives in forward and reverse mode, whose truth is a difference of lower ones in FP64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.function_parts import KERNELS, KNOWN, Collected, Known, family
from accelcheck.workloads.operator_derivatives import difference, slope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.workloads.function_parts import Function


class Cube(torch.autograd.Function):
    """Third power with its derivatives in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * tangents[0]


ROTATION, PLAIN = ((0.6, -0.8), (0.8, 0.6)), ((2.5, 1.0, 0.5), (1.0, 1.5, -0.5), (0.25, -0.5, 2.0))
ZEROS, COLUMN = (3.0, 0.0, 4.0, -1.5), (0.7, 0.5, 0.25, -0.75)
"""A matrix with equal singular values, one without, a row with a zero, and one without."""
_linalg: Any = torch.linalg
FUNCTIONS: Mapping[str, tuple[Function, Any]] = {
    "det of a rotation": (_linalg.det, ROTATION),
    "slogdet of a rotation": (lambda x: _linalg.slogdet(x)[1], ROTATION),
    **{name: (getattr(_linalg, name), PLAIN) for name in ("det", "inv", "matrix_exp", "pinv")},
    **{f"{name} of a rotation": (getattr(_linalg, name), ROTATION) for name in ("inv", "matrix_norm", "pinv")},
    "cholesky": (lambda x: _linalg.cholesky(x @ x.mT), PLAIN),
    "eigvalsh": (lambda x: _linalg.eigvalsh(x + x.mT), PLAIN),
    "slogdet": (lambda x: _linalg.slogdet(x)[1], PLAIN),
    "solve": (lambda x: _linalg.solve(x, x[0]), PLAIN),
    "solve, from the right": (lambda x: _linalg.solve(x, x * x, left=False), PLAIN),
    "solve, one matrix of many": (lambda x: _linalg.solve(x, torch.stack((x, x * x))), PLAIN),
    "solve_triangular": (lambda x: _linalg.solve_triangular(x, x * x, upper=True), PLAIN),
    "cholesky_solve": (lambda x: torch.cholesky_solve(x[:, :2], x.tril()), PLAIN),
    "cholesky_solve, many factors": (lambda x: torch.cholesky_solve(x[:, :2], torch.stack((x, x * x)).tril()), PLAIN),
    "cholesky_inverse": (lambda x: torch.cholesky_inverse(x.tril()), PLAIN),
    "qr": (lambda x: _linalg.qr(x).R, PLAIN),
    "lu": (lambda x: _linalg.lu(x).U, PLAIN),
    "householder_product": (
        lambda x: _linalg.householder_product(x.tril(-1) + torch.eye(3, dtype=x.dtype), x[0]),
        PLAIN,
    ),
    "svdvals": (_linalg.svdvals, PLAIN),
    "traces": (lambda x: torch.trace(x) * torch.trace(x @ x), PLAIN),
    "diagonals": (lambda x: x.diagonal() * (x @ x).diagonal().sum(), PLAIN),
    **{
        f"{name} of zeros": (partial(getattr(torch, name), dim=0), ZEROS)
        for name in ("cumprod", "prod", "logcumsumexp")
    },
    "cumprod": (partial(torch.cumprod, dim=0), COLUMN),
    "a function of its own": (Cube.apply, COLUMN),
    **{f"norm {order:g}": (partial(_linalg.vector_norm, ord=order), COLUMN) for order in (0.5, 1, 2, 3, float("inf"))},
    "normalize": (partial(functional.normalize, dim=0), COLUMN),
    "cosine_similarity": (lambda x: functional.cosine_similarity(x[:2], x[2:], 0), COLUMN),
    "softmax": (partial(torch.softmax, dim=0), COLUMN),
    "log_softmax": (partial(torch.log_softmax, dim=0), COLUMN),
    "std": (torch.std, COLUMN),
    **{
        name: (getattr(functional, name), COLUMN)
        for name in "gelu silu mish softplus elu celu selu logsigmoid tanhshrink hardswish softsign".split()
    },
    **{name: (getattr(torch, name), COLUMN) for name in "sinc erf expm1 tan atan asinh sigmoid".split()},
    "erfinv": (torch.erfinv, COLUMN),
    "pow": (lambda x: x.abs() ** x, COLUMN),
}
"""Functions of a matrix or row, with the point."""
NORMALISATIONS: Mapping[str, Function] = {
    "layer_norm": lambda x: functional.layer_norm(x, (4,), eps=0.1),
    "layer_norm, weighted": lambda x: functional.layer_norm(x, (4,), x * x, x, eps=0.1),
    "rms_norm": lambda x: functional.rms_norm(x, (4,), eps=0.1),
    "batch_norm": lambda x: functional.batch_norm(x[:, None], None, None, training=True, eps=0.1),
    "instance_norm": lambda x: functional.instance_norm(x[None, None], eps=0.1),
    "group_norm": lambda x: functional.group_norm(x[None], 2, eps=0.1),
    "softmax": partial(torch.softmax, dim=0),
    "normalize": partial(functional.normalize, dim=0),
}
"""Normalisations of four numbers."""
ORDERS = ("ff", "fr", "rf", "rr")
"""Modes of the outer and the inner derivative, forward or reverse."""


def _weighted(function: Function, x: Tensor) -> Tensor:
    """Sum of a function's results with different weights."""
    result = function(x)
    flat = (result if isinstance(result, Tensor) else result[0]).reshape(-1)
    return (flat * torch.cos(torch.arange(1.0, len(flat) + 1, dtype=x.dtype, device=x.device))).sum()


def _on_curve(function: Function, x: Tensor, t: Tensor) -> Tensor:
    """`_weighted` on a parabola through a point."""
    places = torch.arange(1.0, x.numel() + 1, dtype=x.dtype, device=x.device).reshape(x.shape)
    return _weighted(function, x + t * torch.sin(places) + t * t * torch.cos(2 * places))


MODES: Mapping[str, Function] = {"f": lambda function: partial(slope, function), "r": torch.func.grad}


@torch.enable_grad()
def nested(function: Function, modes: str, x: Tensor) -> Tensor:
    """Derivative on a curve, by a mode for each order, the outermost first."""
    curve = partial(_on_curve, function, x)
    for mode in reversed(modes):
        curve = MODES[mode](curve)
    return curve(torch.zeros((), dtype=x.dtype, device=x.device))


@torch.enable_grad()
def _differences(function: Function, order: int, x: Tensor) -> Tensor:
    """Derivative of an order: a difference of the gradient, which is in reverse mode."""
    first: Any = torch.func.grad(partial(_on_curve, function, x))
    return difference(first, torch.zeros((), dtype=x.dtype, device=x.device), order - 1)


@torch.enable_grad()
def _hessian(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.func.hessian(partial(_weighted, function))(x)
    return result


@torch.enable_grad()
def _of_gradients(function: Function, x: Tensor) -> Tensor:
    """Hessian of a function by differences of its gradient."""
    gradient: Any = torch.func.grad(partial(_weighted, function))
    units = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
    start = torch.zeros((), dtype=x.dtype)
    columns = [difference(lambda t, unit=unit: gradient(x + t * unit), start) for unit in units]
    return torch.stack(columns, -1).reshape(*x.shape, *x.shape)


def _derivatives(parts: Collected) -> None:
    points = {point: torch.tensor(point) for point in (ROTATION, PLAIN, ZEROS, COLUMN)}
    for (name, (function, point)), modes in product(FUNCTIONS.items(), ORDERS):
        truth = partial(_differences, function, 2)
        parts.add(f"{name}, {modes}", Known(partial(nested, function, modes), truth), points[point])
    for (name, function), modes in product(NORMALISATIONS.items(), ("rrr", "fff", "frr")):
        truth = partial(_differences, function, 3)
        parts.add(f"{name}, {modes}", Known(partial(nested, function, modes), truth), points[COLUMN])


def _hessians(parts: Collected) -> None:
    points = {point: torch.tensor(point) for point in (ROTATION, PLAIN, ZEROS, COLUMN)}
    for name, (function, point) in FUNCTIONS.items():
        parts.add(name, Known(partial(_hessian, function), partial(_of_gradients, function)), points[point])


WORKLOADS = (
    family(
        "derivatives",
        "Second derivatives in forward and reverse mode in each order, and third ones of normalisations.",
        _derivatives,
        techniques=frozenset({"eager"}),
        traits=KNOWN,
    ),
    family("hessians", "Hessians of functions of a matrix or row.", _hessians, techniques=KERNELS, traits=KNOWN),
)
