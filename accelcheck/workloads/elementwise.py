"""Chains of element-wise statements, out of place and in place, and with a 0-d operand."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal


class Shift(nn.Module):
    """``x + y``, never in place: it comes first, and its ``x`` is the caller's."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Statement(nn.Module):
    """One element-wise operation of ``x`` and ``y``, in place on ``x`` when `inplace`.

    In place, autograd allows those operations alone that no later one spoils: none here saves its result (as tanh does).
    """

    __constants__ = ("inplace",)

    def __init__(self) -> None:
        super().__init__()
        self.inplace = False


class Add(Statement):
    """``x + y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.add_(y) if self.inplace else x + y


class Sine(Statement):
    """``sin(x)``: it bounds the values."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002 - all statements take both operands
        return x.sin_() if self.inplace else x.sin()


class Scale(Statement):
    """``1.7 x``, a factor that no binary format holds."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002 - as above
        return x.mul_(1.7) if self.inplace else x * 1.7


class Swish(Statement):
    """``x sigmoid(x)``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG002 - as above
        return functional.silu(x, inplace=self.inplace)


class AddSquare(Statement):
    """``x + y^2 / 2``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.addcmul_(y, y, value=0.5) if self.inplace else torch.addcmul(x, y, y, value=0.5)


_CYCLE = (Sine, Scale, Swish, AddSquare, Add)


class Chain(nn.Module):
    """`length` statements in a row on ``x`` and ``y`` (broadcastable to ``x``).

    With ``y`` of [0.5, 1.5], a sine in every cycle keeps the result below 5 in size.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.statements = nn.ModuleList([Shift(), *(_CYCLE[index % len(_CYCLE)]() for index in range(length - 1))])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for statement in self.statements:
            x = statement(x, y)
        return x


def _problem(generator: torch.Generator, extent: int, *, length: int, scalar: bool = False) -> Problem:
    x = normal(generator, 48 + extent, 64)
    # y lies in [0.5, 1.5]: large enough to matter in every statement, small enough to bound the chain.
    y = normal(generator) if scalar else normal(generator, 48 + extent, 64)
    return Problem(Chain(length), (x, 0.5 + torch.sigmoid(y)))


_TRAITS = frozenset({"scriptable", "resizable"})

WORKLOADS = (
    Workload(
        "elementwise-1",
        "One element-wise addition: all launch, no fusion.",
        partial(_problem, length=1),
        2,
        traits=_TRAITS,
    ),
    Workload(
        "elementwise-5",
        "Five mixed element-wise statements.",
        partial(_problem, length=5),
        1,
        traits=_TRAITS | {"inplace"},
    ),
    Workload(
        "elementwise-30",
        "Thirty mixed element-wise statements: deep fusion.",
        partial(_problem, length=30),
        2,
        traits=_TRAITS | {"inplace"},
    ),
    Workload(
        "elementwise-scalar",
        "Five statements with a 0-d tensor, whose gradient sums over all elements.",
        partial(_problem, length=5, scalar=True),
        2,
        traits=_TRAITS | {"inplace"},
    ),
)
