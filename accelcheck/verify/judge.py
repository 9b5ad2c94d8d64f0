"""Judges a candidate: metadata first, then the NaN/Inf pattern, then the values; faults are named by path."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelcheck.core.case import Figure
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify import own
from accelcheck.verify.effort import LEAST_DRAWS
from accelcheck.verify.few import CALM, FEW, RARE_TOGETHER, cap, quantile
from accelcheck.verify.precision import SLACK, UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.views import GATES, SIGNED, VIEWS, Reading, common_floor
from accelcheck.workloads.base import Result

CLOSE = (4.0, 1.5)
"""Largest excess of a candidate's budget that gets a closer look: factors before the first and the second one. Three
times the largest of 33 samples is no chance."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Faults (none for a right candidate), all figures, readings by path, and compared elements by `kind`."""

    faults: tuple[Fault, ...]
    figures: tuple[Figure, ...]
    readings: Mapping[str, Reading]
    compared: Mapping[str, int] = field(default_factory=dict)

    def near(self, careful: int, reference: Reference | None = None, *, divisible: bool = False) -> frozenset[str]:
        """Paths that need a closer look: views beyond their budgets by at most `CLOSE`, where nothing else is wrong.

        The limit is lower after the first of `careful` looks. Independent results (`divisible`) are chosen separately.

        With a reduced `reference`, all that is beyond its budget gets one closer look, and another where roundings
        decide something: the candidate may be the first of so few samples to show it. So does a tensor of fewer than
        `FEW` elements, whose views are single numbers: a correct one exceeds eight times the largest of four samples in
        2.8e-4 of draws.
        """
        beyond = [figure for figure in self.figures if figure.gates and not figure.within]
        steep = own.OWN if careful == 1 else ()  # small samples know their error at one place badly
        limit = CLOSE[careful - 1]
        small = set[str]()
        if reference is not None:
            if reference.reduced and (careful == 1 or reference.spread > CALM):
                limit = math.inf
            else:
                small = {path for path, truth in reference.truth.items() if truth.numel() < FEW}
        near = {
            (figure.path, figure.view)
            for figure in beyond
            if figure.used <= limit or figure.path in small or figure.view in steep
        }
        wrong = {fault.path for fault in self.faults if (fault.path, fault.view) not in near}
        return frozenset(path for path, _ in near if path not in wrong) if divisible or not wrong else frozenset()

    def amended(self, other: Judgement, paths: Collection[str]) -> Judgement:
        """Judgement with another one's faults, figures and readings of some paths."""
        faults = [*(fault for fault in self.faults if fault.path not in paths), *other.faults]
        figures = [*(figure for figure in self.figures if figure.path not in paths), *other.figures]
        return Judgement(
            tuple(sorted(faults, key=lambda fault: fault.path)),
            tuple(sorted(figures, key=lambda figure: figure.path)),
            {**self.readings, **other.readings},
            self.compared,
        )


@dataclass(frozen=True, slots=True)
class Contract:
    """Metadata required of a candidate.

    Attributes:
        device_type: `torch.device` type that every tensor must be on.
        strides: True where outputs must have eager's strides.
        dtypes: Dtypes besides eager's own that outputs and losses may have (autocast's).
        eager_strides: Eager's strides on the device, by path; other paths have those of the CPU.
    """

    device_type: str
    strides: bool = True
    dtypes: frozenset[str] = frozenset()
    eager_strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


EXACT = "exact"
"""Kind of integers beside floating-point tensors of their own kind."""


def kind(path: str) -> str:
    """Kind of the tensor at a path: its first word, such as ``out``, ``grad`` or ``parameter``."""
    return re.split(r"\W", path, maxsplit=1)[0]


def check_metadata(result: Result, reference: Reference, contract: Contract) -> Iterator[Fault]:
    """Yields faults of structure, device, dtype, shape and strides, on the device, before anything is moved or read."""
    for path in sorted(reference.truth.keys() - result.keys()):
        yield _metadata(path, "missing", "a tensor", "nothing")
    for path in sorted(result.keys() - reference.truth.keys()):
        yield _metadata(path, "unexpected", "nothing", f"a tensor of shape {tuple(result[path].shape)}")
    for path in sorted(result.keys() & reference.truth.keys()):
        tensor, layout = result[path], reference.layouts[path]
        if tensor.device.type != contract.device_type:
            yield _metadata(path, "device", contract.device_type, tensor.device.type)
        dtype = str(tensor.dtype).removeprefix("torch.")
        lenient = path.startswith(("out", "loss")) and reference.truth[path].is_floating_point()
        if dtype != layout.dtype and not (lenient and dtype in contract.dtypes):
            yield _metadata(path, "dtype", layout.dtype, dtype)
        # The truth's shape, since eager's own may be wrong where a truth is known.
        if tensor.shape != reference.truth[path].shape:
            yield _metadata(path, "shape", str(tuple(reference.truth[path].shape)), str(tuple(tensor.shape)))
        elif contract.strides and path.startswith("out"):
            stride = contract.eager_strides.get(path, layout.stride)
            if not _same_strides(tensor, stride):
                yield _metadata(path, "strides", str(stride), str(tensor.stride()))


def judge(result: Result, reference: Reference) -> Judgement:
    """Judges the values of a result's tensors on the CPU, after `check_metadata`, which reports missing ones."""
    faults: list[Fault] = []
    figures: list[Figure] = []
    readings: dict[str, Reading] = {}
    numbers = {kind(path) for path, truth in reference.truth.items() if truth.is_floating_point() and truth.numel()}
    compared: Counter[str] = Counter()
    for path in sorted(reference.judged & result.keys()):
        candidate, truth = result[path], reference.truth[path]
        # Integers beside floating-point numbers do not stand for them: an index is right whatever the logits are.
        exact = not truth.is_floating_point() and kind(path) in numbers
        compared[EXACT if exact else kind(path)] += truth.numel()
        if not truth.is_floating_point():
            if not torch.equal(candidate, truth.to(candidate.dtype)):
                faults.append(value_fault(path, candidate, truth))
            continue
        stick = reference.sticks.get(path)
        if stick is None:  # no elements
            continue
        reading = stick.read(candidate)
        if not reading.finite and (pattern := _pattern_fault(path, candidate, truth)) is not None:
            faults.append(pattern)
            continue
        readings[path] = reading
        budgets = reference.budgets[path]
        seen = [
            Figure(path, view, abs(value), budgets[view], stick.where(view, reading), view in GATES)
            for view, value in zip(VIEWS, reading.values, strict=True)
        ]
        if path in reference.noise and reading.errors is not None:
            seen += [
                Figure(path, view, measured, allowed, "", gates=True)
                for view, (measured, allowed) in own.figures(reading.errors, reference.noise[path]).items()
            ]
        figures += [*seen, *_unexplained(path, reference)]
        faults += [beyond(figure) for figure in seen if not figure.within and figure.gates]
    return Judgement(tuple(faults), tuple(figures), readings, compared)


def judge_together(draws: Sequence[tuple[Mapping[str, Reading], Reference]], *, careful: bool = False) -> Judgement:
    """Judges the signed views over all draws: errors of one sign with a mean that no rounding sample has.

    A fault needs the same direction in all random draws, which have other parameters, inputs and scales, and a mean
    beyond `SLACK` times the largest of the samples' means. A path without a reading in one draw is left out; fewer than
    three draws give an empty judgement. If `careful`, means are held to a quantile of the last look's samples.
    """
    faults: list[Fault] = []
    figures: list[Figure] = []
    if len(draws) < LEAST_DRAWS:
        return Judgement((), (), {})
    paths = set.intersection(*(readings.keys() & reference.leanings.keys() for readings, reference in draws))
    references = [reference for _, reference in draws]
    for path in sorted(paths):
        for view in sorted(SIGNED):
            signed = [readings[path][view] for readings, _ in draws]
            # The n-th samples of all draws make one more run of a correct implementation.
            runs = zip(*(reference.leanings[path][view] for reference in references), strict=False)
            means = [abs(sum(run)) / len(run) for run in runs] or [0.0]
            largest = quantile(means, RARE_TOGETHER) if careful else SLACK * max(means)
            allowed = max(largest, common_floor(view, references[0].unit))
            allowed = max(allowed, SLACK * _leaning_of_eager(path, view, references, allowed))
            together = min(signed) > 0 or max(signed) < 0
            mean = abs(sum(signed)) / len(signed)
            figure = Figure(path, f"{view} in all draws", mean if together else 0.0, allowed, "", gates=True)
            figures.append(figure)
            if not figure.within:
                faults.append(beyond(figure))
    return Judgement(tuple(faults), tuple(figures), {})


def beyond(figure: Figure) -> Fault:
    """Fault of a figure beyond its budget."""
    size, allowed = figure.measured, figure.allowed
    return Fault(FaultKind.VIEW, figure.path, figure.view, measured=size, allowed=allowed, place=figure.where)


def may_be_algorithmic(fault: Fault, shape: Sequence[int]) -> bool:
    """True where fast algorithms may explain a fault of an FP32 tensor: NaN, infinities or an error within the caps."""
    if fault.kind is FaultKind.PATTERN:
        return True
    measured = math.inf if fault.measured is None else fault.measured
    return fault.kind is FaultKind.VIEW and measured <= cap(fault.view, UNIT_ROUNDOFF["float32"], shape)


def value_fault(path: str, candidate: Tensor, truth: Tensor) -> Fault:
    """Fault of a tensor of exact values: its first element that differs."""
    where = tuple((candidate != truth).nonzero()[0].tolist())
    expected, got, place = truth[where].item(), candidate[where].item(), str(list(where)) if where else ""
    size = float(abs(got - expected))
    return Fault(FaultKind.VALUE, path, expected=str(expected), got=str(got), measured=size, place=place)


def _metadata(path: str, part: str, expected: str, got: str) -> Fault:
    return Fault(FaultKind.METADATA, path, part, expected=expected, got=got)


def _unexplained(path: str, reference: Reference) -> Iterator[Figure]:
    """Yields eager's errors on the CPU beyond the rounding samples: information, in no budget."""
    for view, value in reference.eager.get(path, {}).items():
        if view in GATES and not abs(value) <= reference.alone[path][view]:
            yield Figure(path, f"eager's {view}", abs(value), reference.alone[path][view], "", gates=False)


def _leaning_of_eager(path: str, view: str, references: Sequence[Reference], explained: float) -> float:
    """Eager's mean over the draws where the samples explain it; 0 otherwise, or where a draw has no eager."""
    own = [reference.eager[path][view] for reference in references if path in reference.eager]
    mean = abs(sum(own)) / len(own) if len(own) == len(references) else 0.0
    return mean if mean <= explained else 0.0


def _pattern_fault(path: str, candidate: Tensor, truth: Tensor) -> Fault | None:
    """Fault of NaN, +Inf or -Inf that stands elsewhere than in the oracle: NaN is never a wildcard."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {"NaN": torch.isnan, "+Inf": torch.isposinf, "-Inf": torch.isneginf}
    for kind, where in kinds.items():
        expected, got = where(truth), where(candidate)
        differing = (expected != got).nonzero()
        if len(differing):
            counts, place = (f"{int(expected.sum())} of them", f"{int(got.sum())}"), str(differing[0].tolist())
            return Fault(FaultKind.PATTERN, path, kind, "", *counts, measured=len(differing), place=place)
    return None


def _same_strides(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Compares strides where they matter: not in dimensions of size 1 or empty tensors."""
    return tensor.numel() == 0 or all(
        size == 1 or own == expected for size, own, expected in zip(tensor.shape, tensor.stride(), stride, strict=True)
    )


def apart(one: Result, other: Result) -> dict[str, float]:
    """Relative Frobenius distance by path of two results on the CPU: 0 for the same bits.

    It is infinite for other shapes, dtypes or NaN patterns, and for paths of one run. NaN payloads and the sign of zero
    may differ: no operation promises them.
    """
    return {
        path: _distance(one[path], other[path]) if path in one and path in other else math.inf
        for path in sorted(one.keys() | other.keys())
    }


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    differing = one != other
    if one.is_floating_point():
        differing &= ~(one.isnan() & other.isnan())
    if not bool(differing.any()):
        return 0.0
    a, b = one[differing].double(), other[differing].double()
    distance = float((a - b).norm()) / max(float(one.double().nan_to_num().norm()), 1e-300)
    return distance if math.isfinite(distance) and distance > 0.0 else math.inf
