"""Chains of element-wise statements, out of place and in place, and with a 0-d operand."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal, of_normal


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

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sin_() if self.inplace else x.sin()


class Scale(Statement):
    """``1.7 x``, a factor that no binary format holds."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(1.7) if self.inplace else x * 1.7


class Swish(Statement):
    """``x sigmoid(x)``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
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


class Times(nn.Module):
    """``x * y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


class Weigh(nn.Module):
    """``x * weight``, ``weight (32,)``: nothing is added, so that subnormal results stay subnormal."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(32))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Bound(nn.Module):
    """``clamp(max(x, y), -1, 1)`` and ``relu(x)``: selections without rounding."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.maximum(x, y).clamp(-1.0, 1.0), torch.relu(x)


class Overlap(nn.Module):
    """Adds to each column the one before it: an implementation in place would overwrite operands."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:] + x[:, :-1]], dim=1)


def _pair(generator: torch.Generator, extent: int, *, make: type[nn.Module], rows: int, columns: int) -> Problem:
    return Problem(make(), tuple(normal(generator, rows + extent, columns) for _ in range(2)))


def _broadcast(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Times(), (normal(generator, 24 + extent, 32), normal(generator, 1, 32)))


def _problem(generator: torch.Generator, extent: int, *, length: int, scalar: bool = False) -> Problem:
    x = normal(generator, 48 + extent, 64)
    # y lies in [0.5, 1.5]: large enough to matter in every statement, small enough to bound the chain.
    y = normal(generator) if scalar else normal(generator, 48 + extent, 64)
    return Problem(Chain(length), (x, 0.5 + torch.sigmoid(y)))


_TRAITS = frozenset({"scriptable", "resizable"})

_PROBES = frozenset({"nan[0]", "inf[0]", "-inf[0]", "nan[1]", "zeros", "slice"})

WORKLOADS = (
    Workload("elementwise-1", "One element-wise addition: nothing to fuse.",
        partial(_problem, length=1), 2, traits=_TRAITS, probes=_PROBES),
    Workload("elementwise-5", "Five mixed element-wise statements.",
        partial(_problem, length=5), 1, traits=_TRAITS | {"inplace"}, probes=_PROBES),
    Workload("elementwise-30", "Thirty mixed element-wise statements: deep fusion.",
        partial(_problem, length=30), 2, traits=_TRAITS | {"inplace", "activations"}),
    Workload("elementwise-scalar", "Five statements with a 0-d tensor, whose gradient sums over all elements.",
        partial(_problem, length=5, scalar=True), 2, traits=_TRAITS | {"inplace"},
        probes=frozenset({"nan[0]", "zeros"})),
    Workload("elementwise-large", "A product of 256 x 256 elements: one row, column or tile is less than 1 % of it.",
        partial(_pair, make=Times, rows=256, columns=256), 3, frozenset({Mode.FORWARD}), _TRAITS),
    Workload("elementwise-product", "A product alone, which shows what happens to subnormal numbers.",
        partial(of_normal, make=Weigh, shape=(24, 32)), 3, traits=_TRAITS,
        probes=_PROBES - {"nan[1]"} | {"tiny", "scaled"}),
    Workload("elementwise-broadcast", "A matrix times a row, whose gradient is a sum.", _broadcast, 2, traits=_TRAITS),
    Workload("elementwise-bound", "Maximum, clamp and ReLU, which must propagate NaN.",
        partial(_pair, make=Bound, rows=24, columns=32), 3, traits=_TRAITS | {"exact"},
        probes=_PROBES | {"inf[1]", "-inf[1]"}),
    Workload("elementwise-overlap", "Columns that are added to their neighbours.",
        partial(of_normal, make=Overlap, shape=(24, 32)), 2, traits=_TRAITS),
)  # fmt: skip
