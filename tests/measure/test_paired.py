"""Gate 1: the order of measuring, when it stops, what it answers, and the interval that the answer comes from."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable

import pytest

from accelcheck.measure import paired
from accelcheck.measure.clocks import ClockError
from accelcheck.measure.paired import ERROR, LOOKS, SpeedVerdict, compare, fewest, interval, judged


class Bench:
    """Two contenders whose blocks take what a test says, on a clock that goes on by as much."""

    def __init__(self, base: Iterable[float], candidate: Iterable[float]) -> None:
        self.times = {"A": iter(base), "B": iter(candidate)}
        self.order: list[str] = []
        self.at = 100.0

    def runs(self, name: str) -> Callable[[], float]:
        def block() -> float:
            self.order.append(name)
            seconds = next(self.times[name])
            self.at += seconds
            return seconds

        return block

    def now(self) -> float:
        return self.at


def always(seconds: float) -> Iterable[float]:
    return itertools.repeat(seconds)


def spread(center: float, part: float, seed: int) -> Iterable[float]:
    """Times with log-normal noise."""
    chance = random.Random(seed)
    while True:
        yield center * math.exp(chance.gauss(0, part))


def test_each_is_second_as_often_as_first() -> None:
    bench = Bench(always(0.01), always(0.01))
    compare(bench.runs("A"), bench.runs("B"), looks=(0.2,), now=bench.now)
    assert "".join(bench.order[:8]) == "ABBAABBA"
    assert bench.order.count("A") == bench.order.count("B")


def test_a_clear_answer_is_given_at_the_first_look() -> None:
    bench = Bench(always(0.01), always(0.0105))
    comparison = compare(bench.runs("A"), bench.runs("B"), now=bench.now)
    assert comparison.answer is SpeedVerdict.SLOWER
    assert comparison.ratio == pytest.approx(1.05)
    assert LOOKS[0] <= comparison.seconds < LOOKS[0] + 0.03
    assert comparison.pairs == len(bench.order) / 2 == math.ceil(LOOKS[0] / 0.0205)


@pytest.mark.parametrize(
    ("part", "answer"), [(0.95, SpeedVerdict.FASTER), (1.0, SpeedVerdict.SAME), (1.014, SpeedVerdict.SAME)]
)
def test_the_answer_is_the_candidates(part: float, answer: SpeedVerdict) -> None:
    bench = Bench(always(0.01), always(0.01 * part))
    assert compare(bench.runs("A"), bench.runs("B"), now=bench.now).answer is answer


def test_what_stays_unclear_is_measured_to_the_last_look_and_undecided() -> None:
    # Half of the pairs say 10 % slower and half say equal: the interval holds both for ever.
    bench = Bench(always(0.01), itertools.cycle([0.01, 0.011]))
    comparison = compare(bench.runs("A"), bench.runs("B"), now=bench.now)
    assert comparison.answer is SpeedVerdict.UNDECIDED
    assert comparison.seconds >= LOOKS[-1]
    assert (comparison.low, comparison.high) == pytest.approx((1.0, 1.1))


def test_later_looks_decide_what_earlier_ones_cannot() -> None:
    bench = Bench(spread(0.004, 0.035, 1), spread(0.004 * 1.035, 0.035, 2))
    comparison = compare(bench.runs("A"), bench.runs("B"), now=bench.now)
    assert comparison.answer is SpeedVerdict.SLOWER
    assert comparison.seconds > LOOKS[0]
    first = Bench(spread(0.004, 0.035, 1), spread(0.004 * 1.035, 0.035, 2))
    assert compare(first.runs("A"), first.runs("B"), looks=LOOKS[:1], now=first.now).answer is SpeedVerdict.UNDECIDED


def test_slow_blocks_are_measured_until_there_is_an_interval() -> None:
    bench = Bench(always(3.0), always(3.3))
    comparison = compare(bench.runs("A"), bench.runs("B"), now=bench.now)
    assert comparison.pairs == fewest(ERROR) == 9
    assert comparison.answer is SpeedVerdict.SLOWER
    rough = Bench(always(3.0), always(3.3))
    assert compare(rough.runs("A"), rough.runs("B"), now=rough.now, error=0.0625).pairs == 4


def test_the_times_are_kept_in_the_order_in_which_they_were_measured() -> None:
    base, candidate = [0.1 + 0.001 * n for n in range(9)], [0.2 + 0.001 * n for n in range(9)]
    bench = Bench(base, candidate)
    comparison = compare(bench.runs("A"), bench.runs("B"), looks=(0.1,), now=bench.now)
    assert (comparison.base, comparison.candidate) == (tuple(base), tuple(candidate))
    assert comparison.seconds == pytest.approx(sum(base) + sum(candidate))


def test_drift_that_both_share_leaves_the_ratio_alone() -> None:
    drift = [0.01 * 1.01**n for n in range(200)]  # a clock that falls by 1 % a block; B comes after A, then before it
    bench = Bench([], [])
    clock = iter(drift)
    bench.times = {"A": clock, "B": clock}
    comparison = compare(bench.runs("A"), bench.runs("B"), looks=(0.5,), now=bench.now)
    assert comparison.ratio == pytest.approx(1.0, abs=0.011)
    assert comparison.answer is not SpeedVerdict.SLOWER


def test_no_false_alarm_and_nothing_missed_in_200_seeded_runs() -> None:
    answers = {0.0: [], 0.03: []}  # type: dict[float, list[SpeedVerdict]]
    for seed in range(100):
        for planted, seen in answers.items():
            bench = Bench(spread(0.002, 0.02, 2 * seed), spread(0.002 * (1 + planted), 0.02, 2 * seed + 1))
            seen.append(compare(bench.runs("A"), bench.runs("B"), now=bench.now).answer)
    assert set(answers[0.0]) <= {SpeedVerdict.SAME, SpeedVerdict.UNDECIDED}
    assert answers[0.0].count(SpeedVerdict.SAME) > 95
    assert answers[0.03] == [SpeedVerdict.SLOWER] * 100


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1, math.nan])
def test_a_margin_outside_of_0_and_1_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="expected a margin between 0 and 1"):
        compare(lambda: 1.0, lambda: 1.0, margin=margin)


def test_without_a_look_there_is_no_answer() -> None:
    with pytest.raises(ValueError, match="at least one look"):
        compare(lambda: 1.0, lambda: 1.0, looks=())


def test_a_clock_that_fails_ends_the_comparison() -> None:
    def broken() -> float:
        raise ClockError("it went backwards")

    with pytest.raises(ClockError, match="backwards"):
        compare(lambda: 1.0, broken)


def below(count: int, rank: int) -> float:
    """P(Binomial(count, 1/2) < rank), by counting."""
    ways: int = sum(math.comb(count, k) for k in range(rank))
    return ways / 2.0**count


@pytest.mark.parametrize("error", [0.25, 0.05, 0.01, ERROR])
def test_the_interval_is_the_narrowest_whose_error_is_allowed(error: float) -> None:
    for count in range(fewest(error), 80):
        low, high = interval(range(1, count + 1), error)  # each value is its own rank
        assert low + high == count + 1
        assert below(count, int(low)) <= error < below(count, int(low) + 1)


@pytest.mark.parametrize(
    ("count", "rank"),
    [(6, 1), (9, 2), (12, 3), (15, 4), (17, 5), (20, 6), (23, 7), (25, 8), (30, 10), (40, 14), (50, 18)],
)
def test_ranks_are_those_of_printed_tables(count: int, rank: int) -> None:
    # Of the median's interval at 95 %, as of the sign test (Dixon and Mood 1946: one more than the critical count).
    assert interval(range(1, count + 1), 0.025) == (rank, count + 1 - rank)


def test_errors_that_are_powers_of_one_half_count_exactly() -> None:
    for power in range(1, 30):
        assert fewest(0.5**power) == power
        assert interval(list(range(power)), 0.5**power) == (0, power - 1)


def test_the_interval_of_many_values_is_the_normal_approximations() -> None:
    low, high = interval(range(1, 10_001), ERROR)
    assert low == pytest.approx(5000 - 2.807 * 50, abs=2)  # 2.807: quantile of the normal distribution
    assert high == 10_001 - low


def test_the_interval_does_not_depend_on_the_order() -> None:
    values = list(range(50))
    random.Random(0).shuffle(values)
    assert interval(values, 0.01) == interval(range(50), 0.01)


def test_the_interval_misses_the_median_as_seldom_as_it_says() -> None:
    chance = random.Random(0)
    missed = 0
    for _ in range(2000):
        low, high = interval([chance.expovariate(1.0) for _ in range(30)], 0.05)
        missed += not low <= math.log(2) <= high
    expected = 2000 * 2 * below(30, 11)  # the 11th smallest and the 11th largest: 5 % a side allow no narrower one
    assert below(30, 11) <= 0.05 < below(30, 12)
    assert abs(missed - expected) < 3 * math.sqrt(expected)


def test_fewest_is_the_least_count_that_has_an_interval() -> None:
    for error in (0.3, 0.1, 0.05, 0.01, ERROR, 1e-4):
        count = fewest(error)
        assert below(count, 1) <= error < below(count - 1, 1)
        assert interval(range(count), error) == (0, count - 1)
        with pytest.raises(ValueError, match=f"expected at least {count} values .* got {count - 1}"):
            interval(range(count - 1), error)


def test_judged_by_where_the_interval_lies() -> None:
    limit = math.log1p(0.02)
    assert judged(limit * 1.01, 1.0, 0.02) is SpeedVerdict.SLOWER
    assert judged(-1.0, -limit * 1.01, 0.02) is SpeedVerdict.FASTER
    assert judged(-limit, limit, 0.02) is SpeedVerdict.SAME
    assert judged(-limit, limit * 1.01, 0.02) is SpeedVerdict.UNDECIDED
    assert judged(-limit * 1.01, limit, 0.02) is SpeedVerdict.UNDECIDED
    assert judged(limit, 1.0, 0.02) is SpeedVerdict.UNDECIDED


def test_what_was_waited_for_a_core_is_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([2.0, 2.5])
    monkeypatch.setattr(paired, "waited", lambda: next(waited))
    bench = Bench(always(0.01), always(0.01))
    comparison = compare(bench.runs("A"), bench.runs("B"), looks=(0.25,), now=bench.now)
    assert comparison.waited == pytest.approx(0.5 / comparison.seconds)
    monkeypatch.setattr(paired, "waited", lambda: None)
    assert compare(bench.runs("A"), bench.runs("B"), looks=(0.25,), now=bench.now).waited is None
