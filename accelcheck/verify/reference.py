"""Record that a candidate is compared with: FP64 results, metadata and error budgets."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor

from accelcheck.verify.own import Noise
from accelcheck.verify.views import Yardstick
from accelcheck.workloads.base import Result


class OracleError(RuntimeError):
    """The oracle failed or cannot be trusted: the case is an `error`, never a pass."""


class VacuousError(OracleError):
    """Rounding errors alone decide a tensor: its budget would let any fault pass."""


class InapplicableError(OracleError):
    """A class of algorithms applies to no operator of a workload."""


@dataclass(frozen=True)
class Layout:
    """Metadata of a tensor in eager's result: name of the torch dtype, shape, strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Layout of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


_BY_PATH = ("truth", "layouts", "budgets", "leanings", "alone", "eager", "noise", "spread_over")
"""Fields of a `Reference` with a value for each tensor."""


@dataclass(frozen=True)
class Reference:
    """Reference that a candidate is compared with.

    Attributes:
        truth: The FP64 oracle's result by path.
        layouts: Metadata of FP32 (or storage dtype) eager on the CPU, by path.
        budgets: Allowed error by path and view, in the view's unit; none for paths without elements or of integers.
        leanings: Rounding samples' readings of the signed views, by path and view.
        unit: Unit roundoff of the arithmetic precision.
        spacing: Distance of its numbers around 0.
        eager_excess: Largest ratio of eager's own error to the rounding samples', over whole tensors; small if the
            samples explain eager.
        alone: Budgets from the rounding samples alone.
        unjudged: Reasons why tensors are not judged, by path: see `accelcheck.workloads.base.Workload.given`.
        eager: Eager's own readings by path and view; empty without a comparable one. Those within the budget of the
            samples alone enter `budgets`; others widen nothing.
        reduced: True for fewer samples than usual: see `accelcheck.verify.effort`.
        spread: Result of `accelcheck.verify.few.spread` where `reduced`.
        unclassified: Operators whose rounding `accelcheck.verify.operators` does not classify.
        eager_unlike: Difference between the NaN and infinities of eager on the CPU and those of the oracle, though no
            operator's result leaves the range of the storage dtype: eager is wrong. Empty without one.
        noise: Rounding samples' errors at each place, by path, for the views of `accelcheck.verify.own`.
        spread_over: Masks by path, True where a class of algorithms gives no finite numbers; empty without a class.
        groups: Tensors whose rows are matched before they are judged: see `accelcheck.verify.matched`.
    """

    truth: Result
    layouts: Mapping[str, Layout]
    budgets: Mapping[str, Mapping[str, float]]
    leanings: Mapping[str, Mapping[str, tuple[float, ...]]]
    unit: float
    spacing: float
    eager_excess: float
    alone: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    eager: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unjudged: Mapping[str, str] = field(default_factory=dict)
    reduced: bool = False
    spread: float = 1.0
    unclassified: Sequence[str] = ()
    spread_over: Result = field(default_factory=dict)
    noise: Mapping[str, Noise] = field(default_factory=dict)
    eager_unlike: str = ""
    groups: Mapping[str, tuple[Sequence[str], int, int]] = field(default_factory=dict)

    @functools.cached_property
    def without_eager(self) -> Reference:
        """Reference with budgets from the samples alone: eager on the CPU is no peer of itself."""
        other = replace(self, budgets=self.alone, eager={})
        vars(other)["sticks"] = self.sticks
        return other

    @property
    def judged(self) -> frozenset[str]:
        """Paths of the judged tensors."""
        return frozenset(self.truth.keys() - self.unjudged.keys())

    def amended(self, other: Reference) -> Reference:
        """Reference with another one's values of the tensors that the other one judges."""
        judged = other.limited(other.judged)
        merged: dict[str, Any] = {name: {**getattr(self, name), **getattr(judged, name)} for name in _BY_PATH}
        return replace(self, **merged, eager_excess=max(self.eager_excess, other.eager_excess))

    def limited(self, paths: Collection[str]) -> Reference:
        """Reference with the tensors at some paths only."""
        kept: dict[str, Any] = {
            name: {path: value for path, value in getattr(self, name).items() if path in paths} for name in _BY_PATH
        }
        return replace(self, **kept)

    @property
    def summary(self) -> Reference:
        """Reference without tensors, for judging several draws together."""
        return replace(self, truth={}, layouts={}, spread_over={}, noise={})

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.truth.values())

    @functools.cached_property
    def sticks(self) -> Mapping[str, Yardstick]:
        """Yardsticks of the paths with a budget."""
        return {path: Yardstick(self.truth[path], self.unit, self.spacing) for path in self.budgets}

    def plain(self) -> dict[str, Any]:
        """Fields in types that `torch.load` accepts with ``weights_only``."""
        whole = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        layouts = {path: astuple(layout) for path, layout in self.layouts.items()}
        return {**whole, "layouts": layouts, "noise": {path: levels.plain() for path, levels in self.noise.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `plain`."""
        layouts = {path: Layout(*values) for path, values in plain["layouts"].items()}
        noise = {path: Noise.from_plain(values) for path, values in plain["noise"].items()}
        return cls(**{**plain, "layouts": layouts, "noise": noise})
