"""Second and third derivatives in forward and reverse mode, whose truth is a difference of lower ones in FP64."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.function_parts import KNOWN, Collected, Function, KnownFunction, family, table

STEP = 2.0**-8
"""Distance of the points of a difference, whose error of order 6 is then that of FP64."""


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

    jvp = backward


_linalg: Any = torch.linalg
ROTATION, PLAIN = ((0.6, -0.8), (0.8, 0.6)), ((2.5, 1.0, 0.5), (1.0, 1.5, -0.5), (0.25, -0.5, 2.0))
ZEROS, ROW = (3.0, 0.0, 4.0, -1.5), (0.7, 0.5, 0.25, -0.75)
"""A matrix with equal singular values, one without, a row with a zero, and one without."""
OF_MATRIX: Mapping[str, Function] = {
    "slogdet": lambda x: _linalg.slogdet(x)[1],
    "cholesky": lambda x: _linalg.cholesky(x @ x.mT),
    "cholesky_solve": lambda x: torch.cholesky_solve(x[:, :2], x.tril()),
    "cholesky_solve, many factors": lambda x: torch.cholesky_solve(x[:, :2], torch.stack((x, x * x)).tril()),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x.tril()),
    "solve": lambda x: _linalg.solve(x, x[0]),
    "solve, from the right": lambda x: _linalg.solve(x, x * x, left=False),
    "solve, one matrix of many": lambda x: _linalg.solve(x, torch.stack((x, x * x))),
    "solve_triangular": lambda x: _linalg.solve_triangular(x, x * x, upper=True),
    "qr": lambda x: _linalg.qr(x).R,
    "lu": lambda x: _linalg.lu(x).U,
    "eigvalsh": lambda x: _linalg.eigvalsh(x + x.mT),
    "householder_product": lambda x: _linalg.householder_product(x.tril(-1) + torch.eye(len(x), dtype=x.dtype), x[0]),
    "traces": lambda x: torch.trace(x) * torch.trace(x @ x),
}
OF_ROW: Mapping[str, Function] = {
    "a function of its own": Cube.apply,
    "cosine_similarity": lambda x: functional.cosine_similarity(x[:2], x[2:], 0),
    "pow": lambda x: x.abs() ** x,
}
NORMS: Mapping[str, Function] = {
    "layer_norm": lambda x: functional.layer_norm(x, (4,), eps=0.1),
    "layer_norm, weighted": lambda x: functional.layer_norm(x, (4,), x * x, x, eps=0.1),
    "rms_norm": lambda x: functional.rms_norm(x, (4,), eps=0.1),
    "batch_norm": lambda x: functional.batch_norm(x[:, None], None, None, training=True, eps=0.1),
    "instance_norm": lambda x: functional.instance_norm(x[None, None], eps=0.1),
    "group_norm": lambda x: functional.group_norm(x[None], 2, eps=0.1),
}
"""Normalisations of four numbers."""


def functions() -> Iterator[tuple[str, Function, Any]]:
    """Yields functions of matrices and rows, each with a point."""
    matrices = {**OF_MATRIX, **{name: function for name, function, _ in table("matrix")}}
    rows = {**OF_ROW, **NORMS, **{name: function for name, function, _ in table("row")}}
    yield from ((name, function, PLAIN) for name, function in matrices.items())
    yield from ((f"{name} of a rotation", matrices[name], ROTATION) for name in ("det", "slogdet", "inv", "solve"))
    yield from ((name, function, ROW) for name, function in rows.items())
    yield from ((f"{name} of zeros", rows[name], ZEROS) for name in ("cumprod dim=0", "prod dim=0", "softmax dim=0"))


def slope(function: Callable[[Tensor], Any]) -> Function:
    """Derivative of a function of one number, in forward mode."""
    return lambda t: torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]


MODES: Mapping[str, Function] = {"f": slope, "r": torch.func.grad}


def _on_curve(function: Function, x: Tensor, t: Tensor) -> Any:
    """Sum of a function's results, with different weights, on a parabola through a point."""
    places = torch.arange(1.0, x.numel() + 1, dtype=x.dtype, device=x.device).reshape(x.shape)
    flat = function(x + t * torch.sin(places) + t * t * torch.cos(2 * places)).reshape(-1)
    return (flat * torch.cos(torch.arange(1.0, len(flat) + 1, dtype=x.dtype, device=x.device))).sum()


@torch.enable_grad()
def nested(function: Function, modes: str, x: Tensor) -> Tensor:
    """Derivative on a curve, by a mode for each order, the outermost first."""
    curve = partial(_on_curve, function, x)
    for mode in reversed(modes):
        curve = MODES[mode](curve)
    result: Tensor = curve(torch.zeros((), dtype=x.dtype, device=x.device))
    return result


@torch.enable_grad()
def differences(function: Function, order: int, x: Tensor) -> Any:
    """Second or third derivative on a curve, by differences of the gradient."""
    first: Any = torch.func.grad(partial(_on_curve, function, x))
    ends = [[first(torch.tensor(k * STEP * sign, dtype=x.dtype)) for sign in (1, -1)] for k in (1, 2, 3)]
    if order == 2:
        return sum(c * (a - b) for c, (a, b) in zip((45, -9, 1), ends, strict=True)) / (60 * STEP)
    middle = 490 * first(torch.zeros((), dtype=x.dtype))
    return (sum(c * (a + b) for c, (a, b) in zip((270, -27, 2), ends, strict=True)) - middle) / (180 * STEP**2)


def _derivatives(parts: Collected) -> None:
    points = {point: torch.tensor(point) for point in (ROTATION, PLAIN, ZEROS, ROW)}
    every, alike = ("ff", "fr", "rf", "rr"), ("ff", "rr")
    second = ((*entry, modes) for entry in functions() for modes in (alike if entry[2] == ROW else every))
    third = ((name, NORMS[name], ROW, modes) for name, modes in product(NORMS, ("fff", "frr", "rrr")))
    for name, function, point, modes in (*second, *third):
        truth = partial(differences, function, len(modes))
        parts.add(f"{name}, {modes}", KnownFunction(partial(nested, function, modes), truth), points[point])


WORKLOADS = (
    replace(family("derivatives",
        "Second derivatives, with forward (f) and reverse mode (r) in each order, and third ones of normalisations.",
        _derivatives, techniques=frozenset({"eager"}), traits=KNOWN, level=3), draws=1),
)  # fmt: skip
