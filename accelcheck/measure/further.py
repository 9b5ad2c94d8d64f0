"""Widens the interval of a speed-up by further processes, each of which has its own memory layout. No torch."""

import statistics
from dataclasses import replace

from accelcheck.core.case import Measurement, Verdict
from accelcheck.core.journal import Record
from accelcheck.measure.timing_processes import Timed

SPEED_UP = "speed-up"
"""Name of the measurement that baselines hold: time of FP32 eager as a multiple of the technique's."""


def leads(record: Record) -> bool:
    """True if a timed case passes, and its whole interval is above 1: it may be recommended."""
    speed = _speed(record)
    return record.case.timed and record.verdict is Verdict.PASS and speed is not None and (speed.low or 0.0) > 1.0


def widened(record: Record, timed: Timed) -> Record:
    """The record of a case that leads, with a speed-up whose interval spans all processes, at their geometric mean.

    Where the measurements of the further processes are lacking, the interval begins at 0.
    """
    speed = _speed(record)
    assert speed is not None
    assert speed.value is not None
    if timed.lacking:
        made = replace(speed, low=0.0, reason=f"undecided, {timed.lacking}")
    else:
        speeds = [speed.value, *(1.0 / ratio for ratio in timed.ratios)]
        low, high = min(speed.low or 0.0, *speeds), max(speed.high or 0.0, *speeds)
        answer, _, rest = speed.reason.partition(", ")
        listed = ", ".join(f"{one:.2f}" for one in speeds)
        reason = f"{answer if low > 1.0 else 'undecided'}, {rest}, in {len(speeds)} processes: {listed}"
        made = replace(speed, value=statistics.geometric_mean(speeds), low=low, high=high, reason=reason)
    return replace(record, measurements=tuple(made if one is speed else one for one in record.measurements))


def _speed(record: Record) -> Measurement | None:
    return next((one for one in record.measurements if one.name == SPEED_UP and one.value is not None), None)
