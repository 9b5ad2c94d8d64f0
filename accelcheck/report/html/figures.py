"""What the plots of a report show, from records: error against speed-up, and memory beside eager's, of each technique. No torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.core.case import SCHEME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.core.case import Measurement
    from accelcheck.core.journal import Record
    from accelcheck.report.run import DeviceRun

ERROR_VIEW = "row"
"""The view whose figure is plotted: the relative error of the worst row. A scheme of its own, such as quantization, is plotted at `SCHEME`."""


@dataclass(frozen=True, slots=True)
class TradeOff:
    """How much faster than FP32 eager a technique is, and how much it errs, over its timed cases of one mode.

    Attributes:
        technique, device, mode: Of the cases; `device` is a label.
        cases: Number of cases with a speed-up.
        median, low, high: Of their speed-ups: the median, the smallest and the largest.
        error: The largest relative error of a row against the FP32 model; None where no case has that view.
    """

    technique: str
    device: str
    mode: str
    cases: int
    median: float
    low: float
    high: float
    error: float | None


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """Peak memory of a technique as a part of FP32 eager's, over its timed cases of one mode.

    Attributes:
        technique, device, mode: Of the cases; `device` is a label.
        cases: Number of cases with both figures.
        median, low, high: Of the shares: the median, the smallest and the largest.
        peak: Bytes, the largest peak.
    """

    technique: str
    device: str
    mode: str
    cases: int
    median: float
    low: float
    high: float
    peak: float


def value(record: Record, name: str) -> float | None:
    """The value of a measurement; None where there is none, or where it is no finite number."""
    found: Measurement | None = next((one for one in record.measurements if one.name == name), None)
    return found.value if found is not None and found.value is not None and math.isfinite(found.value) else None


def largest(record: Record, view: str) -> float | None:
    """The largest finite figure of a view; None where there is none."""
    found = [figure.measured for figure in record.figures if figure.view == view and math.isfinite(figure.measured)]
    return max(found, default=None)


def tradeoffs(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[TradeOff]:
    """Speed-ups and errors by technique, device and mode, sorted by name."""
    found: dict[tuple[str, str, str], list[tuple[float, float | None]]] = defaultdict(list)
    for run, label in zip(runs, names, strict=True):
        for record in run.records:
            speed = value(record, "speed-up")
            if speed is not None and speed > 0:
                key = (record.case.technique, label, str(record.case.mode))
                off = largest(record, SCHEME)
                found[key].append((speed, largest(record, ERROR_VIEW) if off is None else off))
    rows = []
    for (technique, label, mode), pairs in sorted(found.items()):
        speeds = [speed for speed, _ in pairs]
        errors = [error for _, error in pairs if error is not None]
        middle = _median(speeds)
        rows.append(
            TradeOff(
                technique, label, mode, len(pairs), middle, min(speeds), max(speeds), max(errors) if errors else None
            )
        )
    return rows


def memory(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[MemoryShare]:
    """Peak memory by technique, device and mode, sorted by name."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for run, label in zip(runs, names, strict=True):
        for record in run.records:
            peak, eager = value(record, "peak-memory"), value(record, "peak-memory-fp32-eager")
            # A journal may say anything, and JSON has no infinity.
            if peak is not None and eager is not None and eager > 0 and peak >= 0 and math.isfinite(peak / eager):
                found[record.case.technique, label, str(record.case.mode)].append((peak / eager, peak))
    rows = []
    for (technique, label, mode), pairs in sorted(found.items()):
        shares = [share for share, _ in pairs]
        middle = _median(shares)
        most = max(peak for _, peak in pairs)
        rows.append(MemoryShare(technique, label, mode, len(pairs), middle, min(shares), max(shares), most))
    return rows


def _median(values: Sequence[float]) -> float:
    """The median of finite numbers: halves are added, since the sum of two large ones may not be finite."""
    return statistics.median_low(values) / 2 + statistics.median_high(values) / 2
