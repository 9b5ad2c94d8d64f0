"""The views: ways to look at an error, each sensitive to faults that the others miss.

With c the candidate, o the oracle and e = c - o, all in FP64, as matrices whose rows run along the last dimension:

====== ===========================================================================================
row    max over rows i of |e_i| / sqrt(|o_i|^2 + mean_i |o_i|^2), Frobenius norms
column the same over columns
global |e| / |o|
gain   |<e, o>| / <o, o>: how far a common factor is from 1
ulp    median of |e| / ulp(o), ulp(o) = 2 u |o|: units in the last place of the arithmetic precision
bias   |mean of sign(e)|: whether errors point one way. Not a gate: a correctly rounded constant looks like this
====== ===========================================================================================

The mean row under the root keeps a row that is small only by chance from deciding everything: its error comes from
operands as large as the other rows'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reading:
    """What a view measured, and the index of the worst place (empty where the view has none)."""

    value: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """An error and its oracle, FP64 on the CPU, non-finite elements zeroed in both.

    Attributes:
        error: Candidate minus oracle, any shape.
        oracle: The same shape.
        unit: Unit roundoff of the arithmetic precision.
    """

    error: Tensor
    oracle: Tensor
    unit: float

    @classmethod
    def of(cls, candidate: Tensor, oracle: Tensor, unit: float) -> Pair:
        """Take the difference where both are finite; the NaN/Inf pattern is judged before, elsewhere."""
        candidate = candidate.to(torch.float64)
        finite = torch.isfinite(candidate) & torch.isfinite(oracle)
        zero = torch.zeros((), dtype=torch.float64)
        return cls(torch.where(finite, candidate - oracle, zero), torch.where(finite, oracle, zero), unit)


def ratio(error: float, size: float) -> float:
    """Error / size, where no error is 0 whatever the size, and an error against nothing is infinite."""
    if error == 0.0:
        return 0.0
    return error / size if size > 0.0 else math.inf


def row(pair: Pair) -> Reading:
    """The worst row's relative error."""
    return _worst(_matrix(pair.error), _matrix(pair.oracle), 1, _row_index(pair.error.shape))


def column(pair: Pair) -> Reading:
    """The worst column's relative error."""
    return _worst(
        _matrix(pair.error), _matrix(pair.oracle), 0, lambda index: f"[..., {index}]" if pair.error.dim() else ""
    )


def whole(pair: Pair) -> Reading:
    """The relative Frobenius error of all."""
    return Reading(ratio(float(pair.error.norm()), float(pair.oracle.norm())))


def gain(pair: Pair) -> Reading:
    """How far the best common factor is from 1."""
    along = float((pair.error * pair.oracle).sum())
    return Reading(ratio(abs(along), float(pair.oracle.square().sum())))


def ulp(pair: Pair) -> Reading:
    """The median error in units in the last place, over the elements whose oracle is not 0."""
    nonzero = pair.oracle != 0
    if not bool(nonzero.any()):
        return Reading(0.0)
    return Reading(float((pair.error[nonzero] / (2 * pair.unit * pair.oracle[nonzero])).abs().median()))


def bias(pair: Pair) -> Reading:
    """How one-sided the signs of the errors are: 0 balanced, 1 all the same."""
    if pair.error.numel() == 0:
        return Reading(0.0)
    return Reading(abs(float(pair.error.sign().mean())))


VIEWS: Mapping[str, Callable[[Pair], Reading]] = MappingProxyType(
    {"row": row, "column": column, "global": whole, "gain": gain, "ulp": ulp, "bias": bias}
)
GATES = frozenset({"row", "column", "global", "gain", "ulp"})
"""Views that may fail a case by themselves. `bias` needs the same direction over several seeds to mean anything."""


def floor(view: str, numel: int, unit: float) -> float:
    """The least budget of a view, for what roundings that are common to all elements do to a correct result.

    gain: one rounded constant (a scale, a learning rate) moves every element by up to u, an operand and a result may too.
    bias: n random signs have a mean of 1/sqrt(n) standard deviations; three of them.
    ulp: correct rounding of the result alone errs by up to half a unit.
    Others: none; what eager and the rounding samples show is all.
    """
    if view == "gain":
        return 2 * unit
    if view == "bias":
        return min(1.0, 3 / math.sqrt(max(1, numel)))
    if view == "ulp":
        return 0.5
    return 0.0


def _matrix(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor.reshape(0, 0)  # -1 is ambiguous where a size is 0
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _row_index(shape: torch.Size) -> Callable[[int], str]:
    def name(index: int) -> str:
        if len(shape) < 2:
            return ""
        position = []
        for size in reversed(shape[:-1]):
            index, here = divmod(index, size)
            position.append(str(here))
        return f"[{', '.join(reversed(position))}, :]"

    return name


def _worst(error: Tensor, oracle: Tensor, dim: int, name: Callable[[int], str]) -> Reading:
    if error.numel() == 0:
        return Reading(0.0)
    errors = error.norm(dim=dim)
    squares = oracle.square().sum(dim=dim)
    sizes = (squares + squares.mean()).sqrt()
    ratios = torch.where(errors == 0, torch.zeros_like(errors), errors / sizes)  # 0/0 is no error; x/0 is infinite
    index = int(ratios.argmax())
    return Reading(float(ratios[index]), name(index))
