from __future__ import annotations

import pytest

from accelcheck.core.case import Case, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.measure.further import leads, widened
from accelcheck.measure.timing_processes import Timed


def record(low: float, mode: Mode = Mode.SPEED, verdict: Verdict = Verdict.PASS) -> Record:
    speed = Measurement("speed-up", 2.0, "x", low, 2.1, "faster, 9 pairs")
    return Record(Case("quick", "net", "cpu", "float32", mode, 1), verdict, measurements=(speed,))


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (record(1.9), True),
        (record(1.0), False),
        (record(1.9, Mode.FORWARD), False),
        (record(1.9, verdict=Verdict.FAIL), False),
        (Record(Case("quick", "net", "cpu", "float32", Mode.SPEED, 1), Verdict.PASS), False),
    ],
)
def test_a_case_leads_that_passes_and_is_faster_with_its_whole_interval(of: Record, expected: bool) -> None:
    assert leads(of) is expected


def test_the_interval_spans_all_processes_and_the_value_is_their_mean() -> None:
    (speed,) = widened(record(1.9), Timed((1 / 1.2, 1 / 2.4))).measurements
    assert [speed.low, speed.high] == pytest.approx([1.2, 2.4])
    assert speed.value == pytest.approx((2.0 * 1.2 * 2.4) ** (1 / 3))
    assert speed.reason == "faster, 9 pairs, in 3 processes: 2.00, 1.20, 2.40"


def test_a_process_in_which_it_is_slower_leaves_it_undecided() -> None:
    (speed,) = widened(record(1.9), Timed((1 / 0.8, 1 / 2.0))).measurements
    assert speed.low == pytest.approx(0.8)
    assert speed.reason.startswith("undecided, 9 pairs")


def test_without_further_processes_nothing_is_decided() -> None:
    (speed,) = widened(record(1.9), Timed((0.5,), "it ended")).measurements
    assert (speed.low, speed.high) == (0.0, 2.1)
    assert speed.reason == "undecided, 1 of 2 processes measured it: it ended"
