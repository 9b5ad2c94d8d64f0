"""Judges a long training: step by step while rounding explains the distance, by statistics once it is chaotic.

Two trainings that differ by a rounding error drift apart, at a rate that depends on the problem: by a constant factor a
step where it is chaotic (a Lyapunov exponent), not at all where descent contracts. So the allowance is measured: the
FP64 training is repeated with random rounding errors (`accelcheck.verify.rounding`), and

    allowed(t) = SLACK * max over samples, and for numbers over steps within REACH of t, of distance(t)

The distance of a number (loss, gradient norm) is relative. The distance of a parameter is relative to its movement,
|c - o| / |o - start|, so that lost or doubled updates show long before they are a part of the parameter.

Where the allowance reaches what other seeds do (numbers), or the whole movement (parameters), rounding has become
unpredictable: from that step on, the horizon, single steps are not judged. Statistics are judged with or without chaos:
the mean over the last LATE steps must lie in the prediction interval of one more training,

    |mean - mean over seeds| <= t * s * sqrt(1 + 1 / M)

with s the standard deviation over M trainings of other initialisation and order (G. J. Hahn, JASA 64, 1969).
Convergence tests with fixed tolerances (Liger-Kernel: 32 steps, loss within 2e-5 in FP32, 5e-2 in bfloat16) do the same
with the numbers of one model typed in.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.core.case import Figure
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify.precision import SLACK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from accelcheck.workloads.base import Result

REACH = 4
"""Steps to either side that the allowance of a number includes. At one step a few samples may agree by chance; with 4
samples and 9 steps the allowance is the largest of 36, and a correct training practically never exceeds twice that."""
LATE = 10
"""Last steps whose mean is compared with the trainings from other seeds."""
SEEDS = 9
"""Trainings that the prediction interval is computed from."""
COVERED = 0.999
"""Part of correct trainings inside the prediction interval, both sides together."""

NUMBERS = ("loss", "norm")
_PATH = re.compile(r"(?:(?P<number>loss|norm)\[(?P<at>\d+)\]|parameter:(?P<name>.+)@(?P<after>\d+))")


@dataclass(frozen=True)
class Course:
    """Reference of a training.

    Attributes:
        truth: FP64 training, by the paths of `accelcheck.workloads.trainer.Trainer.train`.
        start: Parameters before it, by name.
        allowed: Allowed distance, by path.
        horizons: First step that is not judged by itself, of ``loss``, ``norm`` and ``parameter``.
        late: Centre and half width of the prediction interval, of ``loss`` and ``norm``.
    """

    truth: Result
    start: Result
    allowed: Mapping[str, float]
    horizons: Mapping[str, int]
    late: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class TrajectoryJudgement:
    """Faults (none for a right training), the worst step of each quantity, and the number of compared elements."""

    faults: tuple[Fault, ...]
    figures: tuple[Figure, ...]
    compared: int


def quantity(path: str) -> str:
    """``loss``, ``norm`` or ``parameter``.

    Raises:
        ValueError: The path is not one of a training.
    """
    return _parsed(path)["number"] or "parameter"


def step(path: str) -> int:
    """Step of a path: a parameter after n steps belongs to step n - 1, the last that changed it."""
    parsed = _parsed(path)
    return int(parsed["at"]) if parsed["at"] else int(parsed["after"]) - 1


def distance(path: str, value: Tensor, course_truth: Result, start: Result) -> float:
    """Distance of a value from the truth, relative to the truth, or to the movement of a parameter; NaN for NaN."""
    truth = course_truth[path].double()
    error = float((value.double() - truth).norm())
    name = _parsed(path)["name"]
    size = float(truth.norm() if name is None else (truth - start[name].double()).norm())
    if math.isnan(error):
        return math.nan
    return error / size if size > 0.0 else (math.inf if error else 0.0)


def chart(truth: Result, start: Result, samples: Sequence[Result], seeds: Sequence[Result]) -> Course:
    """Course from a truth, its repetitions with rounding errors, and trainings from other seeds.

    `start` has the parameters before the FP64 training (`truth`), by name. Of the SEEDS trainings with other
    initialisations and orders only the numbers are read.

    Raises:
        ValueError: There are too few samples or seeds, or rounding is unpredictable from the first step on.
    """
    if not samples or len(seeds) != SEEDS:
        raise ValueError(f"expected samples and {SEEDS} seeds, got {len(samples)} and {len(seeds)}")
    apart = {path: max(distance(path, sample[path], truth, start) for sample in samples) for path in truth}
    allowed = {path: SLACK * _widest(path, apart) for path in truth}
    horizons = {kind: _horizon(kind, truth, allowed, seeds) for kind in (*NUMBERS, "parameter")}
    if early := [kind for kind, at in horizons.items() if at == 0]:
        raise ValueError(f"{', '.join(early)}: rounding errors decide from the first step on; nothing could be judged")
    late = {kind: _interval([_late(result, kind) for result in seeds]) for kind in NUMBERS}
    return Course(truth, start, allowed, horizons, late)


def judge(result: Result, course: Course, paths: Collection[str] | None = None) -> TrajectoryJudgement:
    """Judges a training, on the CPU, by its course: at some paths, or at all of them and by the statistics."""
    wanted = [path for path in course.truth if paths is None or path in paths]
    faults = list(_malformed(result, course, wanted))
    if faults:
        return TrajectoryJudgement(tuple(faults), (), 0)
    worst: dict[str, Figure] = {}
    compared = 0
    for path in wanted:
        kind = quantity(path)
        if step(path) >= course.horizons[kind]:
            continue
        compared += result[path].numel()
        figure = _figure(path, kind, distance(path, result[path], course.truth, course.start), course.allowed[path])
        if kind not in worst or figure.used > worst[kind].used:
            worst[kind] = figure
    figures = [*worst.values(), *(_statistics(result, course) if paths is None else ())]
    faults = [
        Fault(FaultKind.VIEW, f.path, f"{f.view} of the training", measured=f.measured, allowed=f.allowed)
        for f in figures
        if not f.within
    ]
    return TrajectoryJudgement(tuple(faults), tuple(figures), compared)


def _statistics(result: Result, course: Course) -> Iterator[Figure]:
    steps = 1 + max(step(path) for path in result)
    for kind, (centre, half) in course.late.items():
        place = f"{kind}[{max(0, steps - LATE)}:{steps}]"
        yield _figure(place, f"mean {kind}", abs(_late(result, kind) - centre), half)


def _figure(path: str, view: str, measured: float, allowed: float) -> Figure:
    return Figure(path=path, view=view, measured=measured, allowed=allowed, where="", gates=True)


def _malformed(result: Result, course: Course, wanted: Sequence[str]) -> Iterator[Fault]:
    """Yields faults of paths and shapes, then the first step of each quantity that is not finite."""
    whole = len(wanted) == len(course.truth)
    for path in sorted((set(wanted) - result.keys()) | ((result.keys() - course.truth.keys()) if whole else set())):
        known = path in course.truth
        sides = ("a tensor", "nothing") if known else ("nothing", "a tensor")
        yield Fault(FaultKind.METADATA, path, "missing" if known else "unexpected", "", *sides)
    lost: set[str] = set()
    for path in (path for path in wanted if path in result):
        if result[path].shape != course.truth[path].shape:
            expected, got = (str(tuple(side[path].shape)) for side in (course.truth, result))
            yield Fault(FaultKind.METADATA, path, "shape", expected=expected, got=got)
        elif quantity(path) not in lost and not bool(result[path].isfinite().all()):
            lost.add(quantity(path))
            count = int((~result[path].isfinite()).sum())
            got = f"{count} that are none"
            yield Fault(FaultKind.PATTERN, path, "not finite", expected="numbers", got=got, measured=count)


def _widest(path: str, apart: Mapping[str, float]) -> float:
    kind, at = quantity(path), step(path)
    if kind == "parameter":
        return apart[path]  # of many elements: their norm is no accident
    return max(apart.get(f"{kind}[{near}]", 0.0) for near in range(at - REACH, at + REACH + 1))


def _horizon(kind: str, truth: Result, allowed: Mapping[str, float], seeds: Sequence[Result]) -> int:
    """First step whose allowance is not below the seeds' spread, or the whole movement; else the number of steps."""
    mine = [path for path in truth if quantity(path) == kind]
    for path in sorted(mine, key=step):
        limit = 1.0
        if kind in NUMBERS:
            limit = _interval([float(seed[path]) for seed in seeds])[1] / abs(float(truth[path]))
        if not allowed[path] < limit:
            return step(path)
    return 1 + max(step(path) for path in mine)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Centre and half width of the prediction interval of one more value."""
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + COVERED) / 2))
    return statistics.fmean(values), quantile * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))


def _late(result: Result, kind: str) -> float:
    values = [float(result[path]) for path in sorted((p for p in result if quantity(p) == kind), key=step)]
    return sum(values[-LATE:]) / len(values[-LATE:])


def _parsed(path: str) -> re.Match[str]:
    parsed = _PATH.fullmatch(path)
    if parsed is None:
        raise ValueError(f"{path!r} is no path of a training: expected loss[i], norm[i] or parameter:name@n")
    return parsed
