"""Computes the plots of a report: each technique's error against speed-up, and memory against eager's. No torch."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from accelcheck.core.case import SCHEME
from accelcheck.core.journal import Record
from accelcheck.report.run import DeviceRun, measurement

ERROR_VIEW = "row"
"""View that is plotted: the relative error of the worst row; techniques with a scheme of their own have `SCHEME`."""


@dataclass(frozen=True, slots=True)
class _Spread:
    """The median, smallest and largest figure of a technique's timed cases of one mode; `device` is a label."""

    technique: str
    device: str
    mode: str
    cases: int
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TradeOff(_Spread):
    """A technique's speed-up, and its largest relative error of a row against FP32, if a case has that view."""

    error: float | None


@dataclass(frozen=True, slots=True)
class MemoryShare(_Spread):
    """A technique's peak memory as a share of FP32 eager's, and the largest peak in bytes."""

    peak: float


def value(record: Record, name: str) -> float | None:
    """Find a measurement's value; None where there is none, or it is not finite."""
    known = measurement(record, name)
    return known.value if known is not None and known.value is not None and math.isfinite(known.value) else None


def largest(record: Record, view: str) -> float | None:
    """Find the largest finite figure of a view; None where there is none."""
    figures = [figure.measured for figure in record.figures if figure.view == view and math.isfinite(figure.measured)]
    return max(figures, default=None)


def tradeoffs(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[TradeOff]:
    """Collect speed-ups and errors by technique, device and mode, sorted by name."""
    by_case: dict[tuple[str, str, str], list[tuple[float, float | None]]] = defaultdict(list)
    for run, label in zip(runs, names, strict=True):
        for record in run.records:
            speed = value(record, "speed-up")
            if speed is not None and speed > 0:
                key = (record.case.technique, label, str(record.case.mode))
                off = largest(record, SCHEME)
                by_case[key].append((speed, largest(record, ERROR_VIEW) if off is None else off))
    rows = []
    for key, pairs in sorted(by_case.items()):
        worst = max((error for _, error in pairs if error is not None), default=None)
        rows.append(TradeOff(*_spread(key, [speed for speed, _ in pairs]), worst))
    return rows


def memory(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[MemoryShare]:
    """Collect peak memory by technique, device and mode, sorted by name."""
    by_case: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for run, label in zip(runs, names, strict=True):
        for record in run.records:
            peak, eager = value(record, "peak-memory"), value(record, "peak-memory-fp32-eager")
            # A journal may hold anything, and JSON has no infinity.
            if peak is not None and eager is not None and eager > 0 and peak >= 0 and math.isfinite(peak / eager):
                by_case[record.case.technique, label, str(record.case.mode)].append((peak / eager, peak))
    return [
        MemoryShare(*_spread(key, [share for share, _ in pairs]), max(peak for _, peak in pairs))
        for key, pairs in sorted(by_case.items())
    ]


def _spread(key: tuple[str, str, str], values: Sequence[float]) -> tuple[str, str, str, int, float, float, float]:
    """The fields of a `_Spread`."""
    # Halves are added, since the sum of two large numbers may not be finite.
    middle = statistics.median_low(values) / 2 + statistics.median_high(values) / 2
    return *key, len(values), middle, min(values), max(values)
