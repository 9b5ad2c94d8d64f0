"""Gate 2: when a ratio has got worse since it was stored, and what it says it could have seen."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from accelcheck.measure.regression import CHECKED, ERROR, LEAST_SPREAD, STORED, Sample, change

# Of Student's t at 1 - 0.01 / cases, from printed tables: stored and checked processes, cases, quantile.
TABLE = (
    (2, 2, 1, 6.965),
    (3, 2, 1, 4.541),
    (2, 2, 2, 9.925),
    (4, 3, 2, 4.032),
    (6, 3, 10, 4.785),
    (10, 3, 1, 2.718),
    (11, 3, 20, 4.318),
    (16, 16, 4, 3.030),
    (61, 61, 1, 2.358),
)


@pytest.mark.parametrize(("stored", "checked", "cases", "quantile"), TABLE)
def test_limits_have_the_quantiles_of_printed_tables(stored: int, checked: int, cases: int, quantile: float) -> None:
    changed = change(Sample(0.0, 0.01, stored), Sample(0.0, 0.01, checked), cases)
    scale = 0.01 * math.sqrt(1 / stored + 1 / checked)
    assert math.log(changed.limit) == pytest.approx(quantile * scale, abs=5e-4 * scale)


def test_of_thousands_of_cases_two_degrees_of_freedom_have_their_formula_still() -> None:
    # Far out, where a series or a table ends: t = a sqrt(2 / (1 - a^2)), a being the probability between -t and t.
    for cases in (1, 100, 10_000):
        a = 1 - 2 * ERROR / cases
        changed = change(Sample(0.0, 0.01, 2), Sample(0.0, 0.01, 2), cases)
        assert math.log(changed.limit) == pytest.approx(0.01 * a * math.sqrt(2 / (1 - a * a)), rel=1e-6)


def test_with_many_processes_the_quantile_is_the_normal_distributions() -> None:
    normal = statistics.NormalDist().inv_cdf(1 - ERROR / 10)
    changed = change(Sample(0.0, 0.01, 5000), Sample(0.0, 0.01, 5000), 10)
    assert math.log(changed.limit) == pytest.approx(normal * 0.01 * math.sqrt(2 / 5000), rel=2e-3)


def test_a_sample_is_of_logarithms() -> None:
    differences = Sample.of([0.5, 1.0, 2.0])
    assert (differences.mean, differences.spread) == pytest.approx((0.0, math.log(2)))
    assert differences.count == 3


@pytest.mark.parametrize("ratios", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]])
def test_a_sample_of_too_few_or_senseless_ratios_is_refused(ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="expected two or more positive ratios"):
        Sample.of(ratios)


def test_the_limit_and_the_smallest_change_by_hand() -> None:
    changed = change(Sample(0.10, 0.01, 10), Sample(0.13, 0.02, 3), cases=1)
    spread = math.sqrt((9 * 0.01**2 + 2 * 0.02**2) / 11)
    scale = spread * math.sqrt(1 / 10 + 1 / 3)
    assert changed.factor == pytest.approx(math.exp(0.03))
    assert changed.limit == pytest.approx(math.exp(2.718 * scale), rel=1e-4)
    assert changed.smallest == pytest.approx(math.exp(2 * 2.718 * scale), rel=1e-4)
    assert changed.regression


def test_what_got_faster_is_no_regression() -> None:
    assert not change(Sample(0.1, 0.01, 10), Sample(-0.1, 0.01, 3), cases=1).regression


def test_a_spread_that_is_small_by_chance_is_not_believed() -> None:
    chance = change(Sample(0.0, 0.0, 10), Sample(0.0, 0.0, 3), cases=1)
    least = change(Sample(0.0, LEAST_SPREAD, 10), Sample(0.0, LEAST_SPREAD, 3), cases=1)
    assert (chance.limit, chance.smallest) == (least.limit, least.smallest)
    assert chance.limit > 1.005


def test_more_cases_in_a_run_widen_the_limit_of_each() -> None:
    samples = Sample(0.0, 0.01, 10), Sample(0.0, 0.01, 3)
    limits = [change(*samples, cases).limit for cases in (1, 4, 100)]
    assert limits == sorted(limits)
    assert limits[0] < limits[1] < limits[2]


@pytest.mark.parametrize(("stored", "checked", "cases"), [(10, 3, 0), (1, 3, 1), (10, 1, 1)])
def test_too_small_samples_and_no_case_are_refused(stored: int, checked: int, cases: int) -> None:
    with pytest.raises(ValueError, match="expected a case and samples of two or more"):
        change(Sample(0.0, 0.01, stored), Sample(0.0, 0.01, checked), cases)


def run(chance: random.Random, spread: float, slower: float = 1.0) -> tuple[Sample, Sample]:
    """Ten stored processes, and three that are slower."""
    stored = [chance.lognormvariate(0.3, spread) for _ in range(STORED)]
    return Sample.of(stored), Sample.of([slower * chance.lognormvariate(0.3, spread) for _ in range(CHECKED)])


@pytest.mark.slow
def test_runs_of_twenty_cases_give_false_alarm_as_seldom_as_they_say() -> None:
    chance = random.Random(0)
    alarms = sum(any(change(*run(chance, 0.01), cases=20).regression for _ in range(20)) for _ in range(1000))
    assert alarms == 7  # seeded; 10 are expected, at 1 % of runs, and fewer than 20 in all but 1 of 300 series
    assert ERROR == 0.01


def test_a_change_of_the_stated_size_is_found_in_95_of_100_checks() -> None:
    chance = random.Random(1)
    result = 0
    for _ in range(1000):
        stored, checked = run(chance, 0.01)
        further = Sample.of([chance.lognormvariate(0.3, 0.01) for _ in range(STORED)])
        seen, again = (change(stored, sample, cases=20) for sample in (checked, further))
        # The same two samples, had everything been so much slower.
        result += all(item.factor * seen.smallest > item.limit for item in (seen, again))
    assert result >= 950


def test_what_few_processes_name_by_chance_more_of_them_do_not() -> None:
    chance = random.Random(3)

    def sample(count: int, part: float) -> Sample:
        """A part of the processes takes 1.2 times as long as the others: now more of them, now fewer."""
        return Sample.of([chance.lognormvariate(0.2 * (chance.random() < part), 0.01) for _ in range(count)])

    first, both = 0, 0
    for _ in range(2000):
        stored = sample(STORED, 0.1)
        named, again = (change(stored, sample(count, 0.4), cases=100).regression for count in (CHECKED, STORED))
        first, both = first + named, both + (named and again)
    assert (first, both) == (40, 1)  # seeded: 2 % of checks, and one in two thousand


def test_5_per_cent_is_found_where_processes_spread_by_1_per_cent() -> None:
    chance = random.Random(2)
    assert sum(change(*run(chance, 0.01, slower=1.05), cases=1).regression for _ in range(300)) == 300
