"""The reference that a candidate is compared with, as one record: FP64 results, metadata and error budgets."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from accelcheck.verify.own import Noise
from accelcheck.verify.views import Yardstick

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from accelcheck.workloads.base import Result


class OracleError(RuntimeError):
    """The oracle failed or cannot be trusted: the case is an `error`, never a pass."""


class VacuousError(OracleError):
    """Rounding errors alone decide a tensor: its budget would let any fault pass."""


class InapplicableError(OracleError):
    """A class of algorithms applies to no operator of a workload."""


@dataclass(frozen=True)
class Layout:
    """Metadata that eager gives a tensor of the result: name of the torch dtype, shape, strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


_BY_PATH = ("truth", "layouts", "budgets", "leanings", "alone", "eager", "noise", "spread_over")
"""Fields of a `Reference` that have a value for each tensor."""


@dataclass(frozen=True)
class Reference:
    """The reference that a candidate is compared with.

    Attributes:
        truth: The FP64 oracle's result by path.
        layouts: Metadata of FP32 (or storage dtype) eager on the CPU, by path.
        budgets: Allowed error by path and view, in the view's unit; none for paths without elements or of integers.
        leanings: What the rounding samples show in the signed views, by path and view.
        unit: Unit roundoff of the arithmetic precision.
        spacing: Distance of its numbers around 0.
        eager_excess: Largest ratio of eager's own error to the rounding samples', over paths, all elements together: shows that
            the samples explain eager.
        alone: Budgets from the rounding samples alone.
        unjudged: Why tensors are not judged, by path: see `accelcheck.workloads.base.Workload.given`.
        eager: What eager itself shows, by path and view; empty where there is none to compare with. In the views where this is
            within the budget of the samples alone, it enters `budgets`; beyond, it widens nothing.
        reduced: Whether it has less than the usual samples: see `accelcheck.verify.effort`.
        spread: Where it is reduced: see `accelcheck.verify.few.spread`.
        unclassified: Operators of which `accelcheck.verify.operators` does not say how much they round.
        eager_unlike: Difference between the NaN and infinities of eager on the CPU and those of the oracle, though no
            operator's result leaves the range of the storage dtype: eager is wrong. Empty where there is none.
        noise: What the rounding samples show at each place, by path, for the views of `accelcheck.verify.own`.
        spread_over: Where a class of algorithms computes no finite numbers, by path; empty for plain references.
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

    @functools.cached_property
    def without_eager(self) -> Reference:
        """The same with budgets from the samples alone: eager on the CPU is no peer of itself."""
        other = replace(self, budgets=self.alone, eager={})
        vars(other)["sticks"] = self.sticks
        return other

    @property
    def judged(self) -> frozenset[str]:
        """The paths of the tensors that it judges."""
        return frozenset(self.truth.keys() - self.unjudged.keys())

    def amended(self, other: Reference) -> Reference:
        """The same with what another one, of all or some of its paths, says of the tensors that this judges."""
        said = other.limited(other.judged)
        merged: dict[str, Any] = {name: {**getattr(self, name), **getattr(said, name)} for name in _BY_PATH}
        return replace(self, **merged, eager_excess=max(self.eager_excess, other.eager_excess))

    def limited(self, paths: Collection[str]) -> Reference:
        """The same without the tensors at other paths."""
        kept: dict[str, Any] = {
            name: {path: value for path, value in getattr(self, name).items() if path in paths} for name in _BY_PATH
        }
        return replace(self, **kept)

    @property
    def summary(self) -> Reference:
        """The same without tensors: what is judged of several draws together needs none."""
        return replace(self, truth={}, layouts={}, spread_over={}, noise={})

    @functools.cached_property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.truth.values())

    @functools.cached_property
    def sticks(self) -> Mapping[str, Yardstick]:
        """A `Yardstick` for each path that has a budget."""
        return {path: Yardstick(self.truth[path], self.unit, self.spacing) for path in self.budgets}

    def plain(self) -> dict[str, Any]:
        """The same in types that `torch.load` accepts with ``weights_only``."""
        whole = {one.name: getattr(self, one.name) for one in fields(self)}
        layouts = {path: astuple(layout) for path, layout in self.layouts.items()}
        return {**whole, "layouts": layouts, "noise": {path: one.plain() for path, one in self.noise.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """A reference from what `plain` gave."""
        layouts = {path: Layout(*values) for path, values in plain["layouts"].items()}
        noise = {path: Noise.from_plain(values) for path, values in plain["noise"].items()}
        return cls(**{**plain, "layouts": layouts, "noise": noise})
