from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from accelcheck.core.case import Case, Measurement, Mode, Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.core.processes import End
from accelcheck.expectations.limits import LimitError, load
from accelcheck.measure.baselines import Baseline, Baselines, Place
from accelcheck.measure.gate import CHANGE, DETECTABLE, Gate, Use
from accelcheck.measure.regression import Sample, change
from accelcheck.measure.timing_processes import Timed, TimingError

PLACE = Place("cpu", "Some Chip", 2, "2.13", "ATen AVX2")
CASE = Case("compile-static", "speed-mlp", "cpu", "float32", Mode.SPEED, 1)
MEASURED = (
    Measurement("speed-up", 2.0, "x", 1.9, 2.1),
    Measurement("peak-memory", 1000.0, "B"),
    Measurement("peak-memory-fp32-eager", 2000.0, "B"),
    Measurement("first-call-cold", 3.0, "s"),
)
RECORD = Record(CASE, Verdict.PASS, measurements=MEASURED, digest="0123abcd", times=(0.1, 0.2))
STORED = Baseline(CASE.id, "0123abcd", PLACE, Sample(math.log(0.5), 0.01, 10), {"peak-memory": 1000.0})


def gate(tmp_path: Path, use: Use, ratios: tuple[float, ...] = (0.5, 0.505, 0.495), **other: object) -> Gate:
    store = Baselines(tmp_path)
    result = Gate(use, store, {"cpu": PLACE}, stored={"cpu": store.cases(PLACE)}, timed={CASE.id: Timed(ratios)})
    for name, value in other.items():
        setattr(result, name, value)
    return result


def said(record: Record) -> Measurement:
    return next(m for m in record.measurements if m.name == CHANGE)


def test_without_a_wish_nothing_is_said(tmp_path: Path) -> None:
    assert gate(tmp_path, Use.OFF).judge(RECORD) == RECORD


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_what_does_not_pass_is_neither_held_nor_stored(tmp_path: Path, verdict: Verdict) -> None:
    wrong = replace(RECORD, verdict=verdict)
    for use in Use:
        assert gate(tmp_path, use).judge(wrong) == gate(tmp_path, use).keep(wrong) == wrong
    assert not list(tmp_path.rglob("*.json"))


def test_an_unchanged_time_passes_and_says_what_would_have_been_seen(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    record = gate(tmp_path, Use.CHECK).judge(RECORD)
    assert record.verdict is Verdict.PASS
    result = said(record)
    assert result.value == pytest.approx(1.0, abs=0.002)
    assert result.high is not None
    assert result.value is not None
    assert result.value < result.high < 1.03
    smallest = next(m.value for m in record.measurements if m.name == DETECTABLE)
    assert smallest is not None
    assert result.high < smallest < 1.05


def test_a_slowdown_beyond_the_limit_is_a_regression(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    record = gate(tmp_path, Use.CHECK, (0.55, 0.555, 0.545)).judge(RECORD)
    assert record.verdict is Verdict.FAIL
    (fault,) = record.faults
    assert (fault.kind, fault.view) == (FaultKind.REGRESSION, "time")
    assert fault.size == pytest.approx(1.1 / (fault.allowed or 0), rel=1e-3)
    assert 1.0 < (fault.allowed or 0) < 1.1
    assert record.why.endswith("got 1.1")


@pytest.mark.parametrize(("waited", "said"), [(0.31, "; it waited for a core 31% of the time"), (0.01, "")])
def test_a_regression_says_that_other_work_was_beside_it(tmp_path: Path, waited: float, said: str) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    beside = gate(tmp_path, Use.CHECK)
    beside.timed = {CASE.id: Timed((0.55, 0.555, 0.545), waited=(0.0, waited, 0.9))}
    reason = beside.judge(RECORD).why
    assert reason.startswith("regression: ")
    assert reason.partition("got 1.1")[2].startswith(said) is True
    assert ("waited" in reason) is bool(said)


def test_more_cases_share_the_error_and_widen_the_limit(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    first, many = (said(gate(tmp_path, Use.CHECK, compared=cases).judge(RECORD)).high for cases in (1, 200))
    assert first is not None
    assert many is not None
    assert first < many


def test_a_peak_that_grew_by_a_byte_is_a_regression_on_the_cpu_alone(tmp_path: Path) -> None:
    smaller = replace(STORED, figures={"peak-memory": 999.0})
    Baselines(tmp_path).write(smaller, replace=True)
    record = gate(tmp_path, Use.CHECK).judge(RECORD)
    assert record.why == "regression: memory: expected at most 999 bytes, got 1000"
    elsewhere = replace(PLACE, device="cuda")
    case = replace(CASE, device="cuda")
    Baselines(tmp_path).write(replace(smaller, case=case.id, place=elsewhere), replace=True)
    store = Baselines(tmp_path)
    timed = {case.id: Timed((0.5, 0.5))}
    there = Gate(Use.CHECK, store, {"cuda": elsewhere}, stored={"cuda": store.cases(elsewhere)}, timed=timed)
    assert not there.judge(replace(RECORD, case=case)).faults
    assert there.judge(replace(RECORD, case=case)).verdict is Verdict.PASS


def test_no_baseline_is_said_and_does_not_fail(tmp_path: Path) -> None:
    record = gate(tmp_path, Use.CHECK).judge(RECORD)
    assert record.verdict is Verdict.PASS
    assert said(record).value is None
    assert "no baseline for cpu-some-chip-x2/torch-2.13-aten-avx2" in said(record).reason


def test_the_nearest_baseline_is_shown(tmp_path: Path) -> None:
    Baselines(tmp_path).write(replace(STORED, place=replace(PLACE, torch="2.12")), replace=True)
    record = gate(tmp_path, Use.CHECK).judge(RECORD)
    assert record.verdict is Verdict.PASS
    assert "with torch 2.12, ATen AVX2 and 2 of them the time was 0.5 of FP32 eager's" in said(record).reason
    elsewhere = gate(tmp_path, Use.CHECK, environments={"cpu": {"OMP_NUM_THREADS": "1"}})
    assert "2 of them, with no variable set, the time was" in said(elsewhere.judge(RECORD)).reason


def test_a_changed_workload_has_no_baseline(tmp_path: Path) -> None:
    Baselines(tmp_path).write(replace(STORED, digest="ffff0000"), replace=True)
    assert "has changed since" in said(gate(tmp_path, Use.CHECK, (0.9, 0.9, 0.9)).judge(RECORD)).reason


def test_a_baseline_of_another_environment_is_not_held_against(tmp_path: Path) -> None:
    Baselines(tmp_path).write(replace(STORED, environment={"OMP_NUM_THREADS": "1"}), replace=True)
    slower = gate(tmp_path, Use.CHECK, (0.9, 0.9, 0.9))
    record = slower.judge(RECORD)
    assert record.verdict is Verdict.PASS
    assert (
        said(record).reason
        == "the baseline was measured with OMP_NUM_THREADS=1, this with no variable set: not compared; "
        "--accel-baseline=update replaces it"
    )
    assert slower.wanted([CASE]) == []  # nor timed
    slower.environments = {"cpu": {"OMP_NUM_THREADS": "1"}}
    assert slower.wanted([CASE]) == [CASE]
    assert slower.judge(RECORD).verdict is Verdict.FAIL


def test_of_two_baselines_of_a_case_that_of_its_digest_counts(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    (path,) = tmp_path.rglob("*.json")
    for digest in ("00000000", "ffff0000"):
        other = path.with_name(path.name.replace("0123abcd", digest))
        text = path.read_text().replace("0123abcd", digest)
        other.write_text(text.replace('"mean": -0.693147', '"mean": 3.0'))
    assert said(gate(tmp_path, Use.CHECK).judge(RECORD)).value == pytest.approx(1.0, abs=0.002)


def test_what_has_a_baseline_and_could_not_be_timed_is_an_error(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    checking = gate(tmp_path, Use.CHECK)
    checking.timed = {CASE.id: Timed((0.5,), "a process that timed it ended with -9")}
    record = checking.judge(RECORD)
    assert record.verdict is Verdict.ERROR
    why = "1 of 2 processes measured it: a process that timed it ended with -9"
    assert record.code == ErrorCode.NO_BASELINE
    assert record.why == f"not compared with its baseline: {why}"
    assert said(record).reason == why
    checking.timed = {}
    assert "0 of 2 processes measured it" in checking.judge(RECORD).reason


def test_what_half_of_all_processes_could_not_time_does_not_replace_what_is_stored(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    before = Baselines(tmp_path).read(PLACE)
    storing = gate(tmp_path, Use.UPDATE)
    storing.timed = {CASE.id: Timed((0.9,) * 5, "RuntimeError: out of memory", asked=10)}
    record = storing.keep(RECORD)
    assert record.verdict is Verdict.PASS
    assert said(record).reason == "not stored: 5 of 10 processes measured it: RuntimeError: out of memory"
    assert Baselines(tmp_path).read(PLACE) == before
    storing.timed = {CASE.id: Timed((0.9,) * 9, "RuntimeError: out of memory", asked=10)}
    assert said(storing.keep(RECORD)).reason == "stored from 9 processes of 10: RuntimeError: out of memory"


def test_a_baseline_that_cannot_be_written_is_an_error_of_its_case(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storing = gate(tmp_path, Use.UPDATE, store=Baselines(tmp_path / "file"))
    record = storing.keep(RECORD)
    assert record.verdict is Verdict.ERROR
    assert "the baseline of compile-static/speed-mlp/cpu/float32/speed cannot be written" in record.why
    assert record.measurements == RECORD.measurements


def test_processes_time_what_is_stored_or_to_be_stored(tmp_path: Path) -> None:
    other = replace(CASE, technique="eager")
    absent = replace(CASE, device="cuda")
    Baselines(tmp_path).write(STORED, replace=True)
    asked = {use: gate(tmp_path, use).wanted([CASE, other, absent]) for use in Use}
    assert asked[Use.OFF] == []
    assert asked[Use.CHECK] == [CASE]
    assert asked[Use.UPDATE] == asked[Use.NEW_ONLY] == [CASE, other]  # there is no place to store the absent one for


def told(**ratios: tuple[float, ...]) -> tuple[list[tuple[list[str], int]], Callable[..., dict[str, Timed]]]:
    """Stub of processes that give these ratios, ``first`` and then ``again``, and the requests to it."""
    asked: list[tuple[list[str], int]] = []

    def measure(ids: Sequence[str], count: int) -> dict[str, Timed]:
        asked.append((list(ids), count))
        return {case: Timed(ratios["again" if len(asked) > 1 else "first"]) for case in ids}

    return asked, measure


SLOW, AS_STORED = (0.55, 0.555, 0.545), (0.5, 0.505, 0.495, 0.5)


@pytest.mark.parametrize(("again", "verdict"), [(AS_STORED, Verdict.PASS), ((*SLOW, 0.55), Verdict.FAIL)])
def test_what_few_processes_name_is_judged_by_more(tmp_path: Path, again: tuple[float, ...], verdict: Verdict) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    checking = gate(tmp_path, Use.CHECK)
    asked, measure = told(first=SLOW, again=again)
    checking.time([CASE], (3, 10), measure)
    assert asked == [([CASE.id], 3), ([CASE.id], 10)]
    assert checking.timed[CASE.id].ratios == again
    assert checking.judge(RECORD).verdict is verdict


def test_what_the_first_processes_must_name_is_found_no_better_than_they_do(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    checking = gate(tmp_path, Use.CHECK)
    _, measure = told(first=SLOW, again=AS_STORED * 3)
    checking.time([CASE], (3, 10), measure)
    stated = next(m.value for m in checking.judge(RECORD).measurements if m.name == DETECTABLE)
    assert stated == change(STORED.ratio, Sample.of(SLOW), 1).smallest
    assert stated > change(STORED.ratio, Sample.of(AS_STORED * 3), 1).smallest


def test_further_processes_that_do_not_start_are_an_error_of_what_was_named(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    checking = gate(tmp_path, Use.CHECK)

    def measure(ids: Sequence[str], count: int) -> dict[str, Timed]:
        if count > 3:
            raise TimingError("a process ended with 1")
        return {case: Timed(SLOW, asked=count) for case in ids}

    checking.time([CASE], (3, 10), measure)
    record = checking.judge(RECORD)
    assert record.verdict is Verdict.ERROR
    assert record.why == "not compared with its baseline: 0 of 10 processes measured it: a process ended with 1"


def test_what_ended_a_process_is_not_timed_again(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    checking, asked = gate(tmp_path, Use.CHECK), list[int]()

    def measure(ids: Sequence[str], count: int) -> dict[str, Timed]:
        asked.append(count)
        return {case: Timed(SLOW[:2], "why", asked=count, ended=End(-6)) for case in ids}

    checking.time([CASE], (3, 10), measure)
    assert asked == [3]


def test_nothing_more_is_timed_where_nothing_is_named_or_held(tmp_path: Path) -> None:
    Baselines(tmp_path).write(STORED, replace=True)
    for use, first in ((Use.CHECK, AS_STORED), (Use.CHECK, (0.9,)), (Use.UPDATE, SLOW)):
        asked, measure = told(first=first)
        checking = gate(tmp_path, use)
        checking.time([CASE], (3, 10), measure)
        assert asked == [([CASE.id], 3)]
        assert checking.compared == 1


def test_update_replaces_and_new_only_keeps(tmp_path: Path) -> None:
    gate(tmp_path, Use.NEW_ONLY).keep(RECORD)
    first = Baselines(tmp_path).read(PLACE)[CASE.id]
    assert first.ratio.factor == pytest.approx(0.5, rel=1e-4)
    assert first.figures == {"peak-memory": 1000.0, "peak-memory-fp32-eager": 2000.0, "first-call-cold": 3.0}
    kept = gate(tmp_path, Use.NEW_ONLY, (0.9, 0.9)).keep(RECORD)
    assert "kept" in said(kept).reason
    assert Baselines(tmp_path).read(PLACE)[CASE.id] == first
    gate(tmp_path, Use.UPDATE, (0.9, 0.9)).keep(RECORD)
    assert Baselines(tmp_path).read(PLACE)[CASE.id].ratio.factor == pytest.approx(0.9)


LIMITS = """
schema = 1
[[limit]]
cases = ["compile-*/*/cpu/*/speed"]
{field}
reason = "why we compile"
"""


@pytest.mark.parametrize(
    ("broken", "kept"),
    [
        ("speed-up-at-least = 2.2", "speed-up-at-least = 2.05"),
        ("memory-at-most = 0.4", "memory-at-most = 0.5"),
        ("first-call-at-most = 2.5", "first-call-at-most = 3"),
    ],
)
def test_a_broken_limit_fails_with_its_reason(tmp_path: Path, broken: str, kept: str) -> None:
    for field, verdict in ((broken, Verdict.FAIL), (kept, Verdict.PASS)):
        path = tmp_path / "limits.toml"
        path.write_text(LIMITS.format(field=field))
        record = gate(tmp_path, Use.OFF, limits=load([path])).judge(RECORD)
        assert record.verdict is verdict
        assert ("why we compile" in record.why) == (verdict is Verdict.FAIL)
    other = replace(RECORD, case=replace(CASE, technique="eager"))
    assert gate(tmp_path, Use.OFF, limits=load([path])).judge(other) == other


def test_a_limit_that_was_held_against_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text(LIMITS.format(field="memory-at-most = 0.8\nspeed-up-at-least = 1.5"))
    limited = gate(tmp_path, Use.OFF, limits=load([path]))
    assert limited.idle([RECORD]) == []
    assert limited.idle([replace(RECORD, measurements=())]) == []  # as where workers do not time
    without = replace(RECORD, measurements=MEASURED[:1])
    line = "limit: memory-at-most 0.8 of compile-*/*/cpu/*/speed: no timed case has this figure"
    assert limited.idle([without]) == [line]
    assert len(limited.idle([replace(RECORD, case=replace(CASE, technique="eager"))])) == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("schema = 2", "'schema': expected 1, which this accelcheck reads, got 2"),
        ("schema = 1\nlimit = 3", "'limit': expected a list"),
        ("schema = 1\nlimit = [3]", "limit 1: field 'limit': expected a table, got 3"),
        (
            LIMITS.format(field="speed-up-at-last = 2"),
            "unknown field 'speed-up-at-last'. Did you mean 'speed-up-at-least'?",
        ),
        (
            LIMITS.format(field="speed-up-at-least = true"),
            "field 'speed-up-at-least': expected a positive number, got True",
        ),
        (LIMITS.format(field="memory-at-most = -1"), "field 'memory-at-most': expected a positive number, got -1"),
        (LIMITS.format(field="memory-at-most = nan"), "field 'memory-at-most': expected a positive number, got nan"),
        (LIMITS.format(field=""), "at least one of speed-up-at-least"),
        ('schema = 1\n[[limit]]\nmemory-at-most = 1\nreason = "x"', "field 'cases': missing; expected a list"),
        ('schema = 1\n[[limit]]\ncases = ["*"]\nmemory-at-most = 1', "field 'reason': missing; expected a sentence"),
        ("schema = ", "not TOML"),
        ("schema = 1\n[[limits]]", "unknown field 'limits'. Did you mean 'limit'?"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_of_limits_is_named(tmp_path: Path, text: str | None, named: str) -> None:
    path = tmp_path / "limits.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LimitError) as raised:
        load([path])
    assert str(path) in str(raised.value)
    assert named in str(raised.value)
