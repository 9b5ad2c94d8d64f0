"""Makes the terminal's table of timed cases, a line per case. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.units import duration, size
from accelcheck.report.console import aligned
from accelcheck.report.run import measurement

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.core.case import Measurement
    from accelcheck.core.journal import Record

HEAD = (
    "technique", "workload", "mode", "dtype", "median", "speed-up", "interval", "is", "same prec.", "peak",
    "of eager's", "first call", "cached", "launches", "baseline",
)  # fmt: skip
SHOWN = 3
"""Most cases named in a note; of more, it gives the number."""


def lines(records: Iterable[Record]) -> list[str]:
    """Format the table and notes on baselines; empty if no case was timed."""
    timed = [record for record in records if record.measurements and record.case.timed]
    if not timed:
        return []
    rows = [_row(record) for record in timed]
    devices = {record.case.device for record in timed}
    title = (
        "speed beside FP32 eager in the same process, peak memory, seconds of the first call (caches cold, then warm):"
    )
    table = [title if len(devices) == 1 else f"{', '.join(sorted(devices))}: {title}", *aligned([HEAD, *rows])]
    fewer = [(f"  {record.case.id}", why) for record in timed if (why := _fewer(record))]
    if fewer:
        table += ["", "launches fewer than eager:", *aligned(fewer)]
    held = [record for record in timed if measurement(record, "baseline-detectable") is not None]
    if held:
        table.append(
            f"compared with baselines: {len(held)} of {len(timed)} cases; in brackets the factor from which on it is "
            "a regression, and the smallest slowdown that such a check finds in 95 of 100 runs"
        )
    notes: dict[str, list[str]] = {}
    for record in timed:
        change = measurement(record, "baseline-change")
        if change is not None and change.value is None:
            notes.setdefault(change.reason, []).append(record.case.id)
    return [*table, *(f"baseline: {note} ({_some(cases)})" for note, cases in sorted(notes.items()))]


def _some(cases: list[str]) -> str:
    """Name the cases if they are at most `SHOWN`, else count them."""
    return ", ".join(cases) if len(cases) <= SHOWN else f"{len(cases)} cases"


def _row(record: Record) -> tuple[str, ...]:
    by_name = {known.name: known for known in record.measurements}
    case = record.case
    speed_up, same = by_name.get("speed-up"), by_name.get("speed-up-same-precision")
    change, detectable = by_name.get("baseline-change"), _value(by_name.get("baseline-detectable"))
    return (
        case.technique,
        case.workload,
        str(case.mode),
        case.dtype,
        _time(_value(by_name.get("latency"))),
        _factor(_value(speed_up)),
        "" if speed_up is None or speed_up.low is None else f"{speed_up.low:.3f}..{speed_up.high:.3f}",
        "" if speed_up is None else speed_up.reason.partition(",")[0],
        _factor(_value(same)),
        _bytes(_value(by_name.get("peak-memory"))),
        _part(_value(by_name.get("peak-memory")), _value(by_name.get("peak-memory-fp32-eager"))),
        _time(_value(by_name.get("first-call-cold"))),
        _time(_value(by_name.get("first-call-warm"))),
        _of(_value(by_name.get("launches")), _value(by_name.get("launches-fp32-eager"))),
        "" if change is None or detectable is None else f"{change.value:.3f} ({change.high:.3f}, {detectable:.3f})",
    )


def _fewer(record: Record) -> str:
    """Compare the launches of a case with those of eager, if there are fewer; else empty."""
    own, eager = measurement(record, "launches"), _value(measurement(record, "launches-fp32-eager"))
    if own is None or own.value is None or eager is None or own.value >= eager:
        return ""
    return own.reason


def _value(known: Measurement | None) -> float | None:
    return None if known is None else known.value


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _bytes(count: float | None) -> str:
    return "-" if count is None else size(int(count))


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _part(value: float | None, whole: float | None) -> str:
    return "" if value is None or not whole else f"{100 * value / whole:.0f} %"


def _of(value: float | None, other: float | None) -> str:
    return "" if value is None or other is None else f"{value:.0f} of {other:.0f}"
