"""Error budgets from rounding samples, and a test that the samples explain eager."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import torch

from accelcheck.verify.effort import CAREFUL
from accelcheck.verify.few import RARE, beyond, cap, quantile, single
from accelcheck.verify.own import Noise, noise
from accelcheck.verify.precision import SLACK
from accelcheck.verify.reference import OracleError, VacuousError
from accelcheck.verify.views import VIEWS, Reading, Yardstick, budget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelcheck.verify.oracle_runs import Source
    from accelcheck.workloads.base import Result

TRUST = 4.0
"""Largest ratio of eager's error to the rounding samples' before the oracle, or eager, counts as wrong. The largest of
all built-in workloads, dtypes and modes on the CPU is 1.5, the median 0.3. Another order of summation may show more, a
wrong oracle shows orders of magnitude. `eager_excess` in the journal has the ratio of each case."""


class Samples:
    """Readings of rounding samples. Each sample is read and dropped: whole results take the model's memory each."""

    def __init__(self, truth: Result, unit: float, spacing: float) -> None:
        self._truth = truth
        self.sticks = {
            path: Yardstick(tensor, unit, spacing)
            for path, tensor in truth.items()
            if tensor.is_floating_point() and tensor.numel()
        }
        self.readings: dict[str, list[Reading]] = {path: [] for path in self.sticks}
        self.unlike = ""
        """Difference of the first sample that has not the truth's structure."""
        self._shapes: dict[str, set[tuple[int, ...]]] = {path: {tuple(tensor.shape)} for path, tensor in truth.items()}
        self.in_range = False
        """True if each operator's result, rounded to the storage dtype, stays in its range."""

    def read(self, sample: Result, *, optional: bool = False) -> bool:
        """Reads a sample; False if it is unlike the truth, which is no fault of an `optional` one."""
        differing = unlike(self._truth, sample)
        for path in self._shapes.keys() & sample.keys():
            self._shapes[path].add(tuple(sample[path].shape))
        if differing:
            self.unlike = self.unlike or ("" if optional else differing)
            return False
        for path, stick in self.sticks.items():
            self.readings[path].append(stick.read(sample[path]))
        return True

    def varying(self) -> str:
        """Names the first tensor whose shape depends on rounding, with its shapes; empty without one."""
        for path, shapes in self._shapes.items():
            if len(shapes) > 1:
                return f"{path} has the shapes {' or '.join(map(str, sorted(shapes)))}"
        return ""

    def noise(self, source: Source) -> dict[str, Noise]:
        """Errors of the samples at each place, for paths with enough samples.

        Empty where a rounding moves a whole step of a scheme, where samples are few, and where operands are rounded on
        their way, as by autocast: samples round results, and a cancellation of operands may err by more.
        """
        if source.technique.oracle != "float64" or source.effort.reduced or source.precision != source.dtype:
            return {}
        known = {}
        for path, readings in self.readings.items():
            errors = [reading.errors for reading in readings if reading.errors is not None]
            if (levels := noise(errors, self.sticks[path].sizes, source.unit, source.spacing)) is not None:
                known[path] = levels
        return known


def _budgets(who: str, peers: list[Reading], unit: float) -> dict[str, float]:
    budgets: dict[str, float] = {}
    for view in VIEWS:
        budgets[view] = budget(view, [peer[view] for peer in peers], unit)
        if not 0.0 <= budgets[view] < math.inf:
            raise VacuousError(
                f"{who}: the budget of view {view} is {budgets[view]}; legal are finite numbers from 0. Infinite, "
                "anything would pass: the oracle is 0 where rounding errs. Change the workload so that this tensor is "
                "not made of rounding errors alone"
            )
    return budgets


def of_samples(
    source: Source, readings: Mapping[str, list[Reading]], truth: Result, careful: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Budgets from the samples by path, and messages for paths without one, which rounding errors alone decide.

    A closer look has the first look's samples too, so that the same paths have none.

    Raises:
        VacuousError: Rounding errors alone decide a tensor of a workload made for checks, or every tensor.
    """
    budgets, vacuous = dict[str, dict[str, float]](), dict[str, str]()
    for path, samples in readings.items():
        try:
            budgets[path] = _of_path(source, path, samples, truth[path].shape, careful)
        except VacuousError as error:
            if not source.workload.given:
                raise
            vacuous[path] = str(error)
    if vacuous and not budgets:
        first = next(iter(vacuous.values()))
        raise VacuousError(f"{source}: rounding errors alone decide every tensor; the first one: {first}")
    return budgets, vacuous


def _of_path(source: Source, path: str, samples: list[Reading], shape: Sequence[int], careful: int) -> dict[str, float]:
    """Budgets of one path within their caps; a `given` workload is held to the caps of the first look."""
    who, unit = f"{source}: {path}", source.unit
    budgets = _budgets(who, samples, unit)
    if source.technique.oracle != "float64":  # a rounding moves what a scheme quantizes by a whole step
        return budgets
    if not careful:
        return _capped(who, budgets, unit, shape)
    for view in VIEWS if careful == len(CAREFUL) else ():
        if single(view, shape):
            budgets[view] = max(budgets[view], quantile([abs(sample[view]) for sample in samples], RARE))
    if source.workload.given:
        usual, many = (source.effort.count(source.draw, look) for look in (0, careful))
        _capped(who, _budgets(who, [*samples[:usual], *samples[many:]], unit), unit, shape)
    return {view: min(budget, cap(view, unit, shape)) for view, budget in budgets.items()}


def _capped(who: str, budgets: dict[str, float], unit: float, shape: Sequence[int]) -> dict[str, float]:
    """Returns the budgets if each is within its cap; raises VacuousError otherwise."""
    if vacuous := beyond(budgets, unit, shape):
        raise VacuousError(f"{who}: {vacuous}")
    return budgets


def with_eager(alone: Mapping[str, float], eager: Mapping[str, float]) -> dict[str, float]:
    """Budgets of one path; eager is among the peers in views where the samples explain it."""
    errors = {view: abs(eager.get(view, 0.0)) for view in alone}
    return {v: max(budget, SLACK * errors[v]) if errors[v] <= budget else budget for v, budget in alone.items()}


def excess(source: Source, own: Mapping[str, Reading], samples: Mapping[str, list[Reading]]) -> float:
    """Largest ratio of eager's error to the samples', over whole tensors.

    Raises:
        OracleError: The ratio exceeds `TRUST`; with reduced effort, in half of the tensors: eager may decide by a
            rounding what none of the small samples did (see `accelcheck.verify.few`), which only some tensors show.
    """
    # Half a unit of the result's own rounding is explained whatever the samples show.
    ratios = {
        path: reading.relative / max(source.unit, *(s.relative for s in samples[path])) for path, reading in own.items()
    }
    worst = max(ratios, key=lambda path: ratios[path], default="")
    largest = ratios.get(worst, 0.0)
    held = statistics.median(ratios.values()) if source.effort.reduced and ratios else largest
    if not held <= TRUST:
        raise OracleError(
            f"{source}: eager {source.precision} on the CPU errs {held:.3g} times more than rounding explains "
            f"(limit {TRUST:g}), most at {worst}: the oracle or eager is wrong, so nothing can be judged by them"
        )
    return largest


def unlike(truth: Result, other: Result, *, patterns: bool = True) -> str:
    """First difference in paths, shapes, integers or places of NaN and infinities (`patterns`); empty without one."""
    if truth.keys() != other.keys():
        return f"only one has {', '.join(sorted(truth.keys() ^ other.keys()))}"
    for path, tensor in truth.items():
        if tensor.shape != other[path].shape:
            return f"{path} has the shapes {tuple(tensor.shape)} and {tuple(other[path].shape)}"
        if not tensor.is_floating_point():
            if differing := int((tensor != other[path]).sum()):
                return f"{path}: {differing} of {tensor.numel()} integers differ"
            continue
        for kind in (torch.isnan, torch.isposinf, torch.isneginf) if patterns else ():
            mine, others = kind(tensor), kind(other[path])
            if not torch.equal(mine, others):
                return f"{path}: {kind.__name__} holds for {int(mine.sum())} and {int(others.sum())} elements"
    return ""
