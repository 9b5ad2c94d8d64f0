"""Gate 3: the order of sides, and the interval that the answer comes from."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from accelcheck.measure import duet
from accelcheck.measure.paired import SpeedVerdict


def test_the_order_of_sides_alternates() -> None:
    assert [duet.order(pair) for pair in range(4)] == [(0, 1), (1, 0), (0, 1), (1, 0)]


def test_the_interval_is_students_with_the_error_shared_among_looks_cases_and_sides() -> None:
    logs = [0.01, 0.02, 0.03, 0.04, 0.05]
    judgement = duet.judge([math.exp(value) for value in logs], cases=1, looks=5)
    half = 7.173 * statistics.stdev(logs) / math.sqrt(5)  # 7.173: t of 4 degrees at 0.001, from printed tables
    assert math.log(judgement.ratio) == pytest.approx(0.03)
    assert math.log(judgement.low) == pytest.approx(0.03 - half, abs=1e-5)
    assert math.log(judgement.high) == pytest.approx(0.03 + half, abs=1e-5)
    assert judgement.pairs == 5


def test_more_cases_and_more_looks_widen_the_interval() -> None:
    ratios = [1.01, 1.02, 0.99, 1.0, 1.015]
    widths = [duet.judge(ratios, *shared).high for shared in ((1, 1), (1, 5), (4, 5), (40, 5))]
    assert widths == sorted(set(widths))


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.05, SpeedVerdict.SLOWER),
        (0.95, SpeedVerdict.FASTER),
        (1.0, SpeedVerdict.SAME),
        (1.02, SpeedVerdict.UNDECIDED),
    ],
)
def test_the_answer_is_held_against_the_margin(ratio: float, expected: SpeedVerdict) -> None:
    ratios = [ratio * (1.001 if number % 2 else 0.999) for number in range(8)]
    assert duet.judge(ratios, 1).answer is expected


def test_a_wider_margin_makes_the_same_of_what_was_slower() -> None:
    ratios = [1.049, 1.05, 1.051, 1.05, 1.0505]
    assert duet.judge(ratios, 1).answer is SpeedVerdict.SLOWER
    assert duet.judge(ratios, 1, margin=0.1).answer is SpeedVerdict.SAME


@pytest.mark.parametrize("ratios", [[], [1.0], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]])
def test_too_few_or_senseless_ratios_are_refused(ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="expected two or more positive ratios"):
        duet.judge(ratios, 1)


@pytest.mark.parametrize(("cases", "looks", "margin"), [(0, 5, 0.02), (1, 0, 0.02), (1, 5, 0.0), (1, 5, 1.0)])
def test_no_case_no_look_and_senseless_margins_are_refused(cases: int, looks: int, margin: float) -> None:
    with pytest.raises(ValueError, match="expected a case, a look and a margin"):
        duet.judge([1.0, 1.1], cases, looks, margin)


def simulated(chance: random.Random, spread: float, planted: float, cases: int) -> duet.Duet:
    """A duet of processes whose log times spread so, on both sides."""
    ratios = [(1 + planted) * math.exp(chance.gauss(0, spread) - chance.gauss(0, spread)) for _ in range(34)]
    for look in duet.LOOKS:
        judgement = duet.judge(ratios[:look], cases)
        if judgement.answer is not SpeedVerdict.UNDECIDED:
            break
    return judgement


@pytest.mark.parametrize("spread", [0.004, 0.01, 0.015])
def test_5_per_cent_is_found_and_nothing_else(spread: float) -> None:
    chance = random.Random(0)
    for cases in (1, 20):
        slower = [simulated(chance, spread, 0.05, cases).answer for _ in range(200)]
        assert slower == [SpeedVerdict.SLOWER] * 200
        assert {simulated(chance, spread, 0.0, cases).answer for _ in range(200)} <= {
            SpeedVerdict.SAME,
            SpeedVerdict.UNDECIDED,
        }


def test_at_the_margin_itself_a_run_errs_as_seldom_as_it_says() -> None:
    chance = random.Random(1)
    alarms = sum(simulated(chance, 0.01, duet.MARGIN, 1).answer is SpeedVerdict.SLOWER for _ in range(2000))
    assert alarms == 2  # seeded; at most 10 are expected: half of the error is for this side


def test_the_latency_of_a_process_is_not_moved_by_work_beside_it() -> None:
    quiet = [1.0 + 0.001 * number for number in range(20)]
    beside = [*quiet, *(2.0 + number for number in range(60))]
    assert duet.latency(quiet) == pytest.approx(1.0019)
    assert duet.latency(beside) == pytest.approx(1.0079)
    assert duet.latency([1.0, 2.0]) == pytest.approx(1.1)
