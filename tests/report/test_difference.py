"""Differences of two runs: worse, only shown, or none."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelcheck.cli import main
from accelcheck.core.case import Case, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.base import Fingerprint
from accelcheck.report import difference_text
from accelcheck.report.console import plain
from accelcheck.report.difference import GROWTH, RELATIVE, ULPS, Aspect, CaseChange, Difference, compare
from accelcheck.report.run import DeviceRun, OwnModel, load
from accelcheck.verify.precision import SLACK
from accelcheck.verify.views import VIEWS

STORED = Path(__file__).parents[2] / "baselines"
CPU, XLA = (STORED / name / "level1.jsonl" for name in ("cpu", "xla"))
EPYC = Fingerprint("cpu", "EPYC", 2, versions={"torch": "2.13.0"})
ULP = 2.0**-23
"""Machine epsilon of float32."""


def run(*records: Record, fingerprint: Fingerprint = EPYC) -> DeviceRun:
    return DeviceRun(
        fingerprint.device, fingerprint, "ok", "0.1.0", "3.11.7", ("Linux",), 1, "", ({},), {}, records, ("j",)
    )


def record(
    technique: str = "eager", verdict: Verdict = Verdict.PASS, reason: str = "", *, device: str = "cpu", **more: Any
) -> Record:
    return Record(Case(technique, "mlp", device, "float32", Mode.FORWARD, 1), verdict, reason=reason, **more)


def figure(ulps: float, path: str = "out", view: str = "row", allowed: float = 4.0, *, gates: bool = True) -> Figure:
    """An error and its budget in units in the last place."""
    unit = ULP if view in RELATIVE else 1.0
    return Figure(path, view, ulps * unit, allowed * unit, "", gates)


def only(found: Difference) -> CaseChange:
    (change,) = found.changes
    return change


def of(before: Record, after: Record) -> Difference:
    return compare([run(before)], [run(after)])


def test_the_command_of_a_difference_has_the_model_of_the_run() -> None:
    models = {"mlp": OwnModel("net.py:make")}
    later = replace(run(record(verdict=Verdict.FAIL)), imports=("vendor",), models=models)
    change = only(compare([run(record())], [later]))
    assert change.reproduction.endswith(
        "--accel-case=eager/mlp/cpu/float32/forward --accel-import=vendor --accel-model=net.py:make"
    )


def test_a_run_does_not_differ_from_itself() -> None:
    for path in (CPU, XLA, CPU.with_name("level1-speed.jsonl")):
        comparison = compare(load([path]), load([path]))
        assert comparison.changes == ()
        assert comparison.pairs[0].same
        assert comparison.pairs[0].both > 20


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (Verdict.PASS, Verdict.FAIL, True),
        (Verdict.PASS, Verdict.XFAIL, True),  # right before, whatever a ledger says now
        (Verdict.FAIL, Verdict.CRASH, True),
        (Verdict.ERROR, Verdict.HANG, True),
        (Verdict.PASS, Verdict.FLAKY, True),
        (Verdict.XFAIL, Verdict.FAIL, True),
        (Verdict.FAIL, Verdict.PASS, False),
        (Verdict.CRASH, Verdict.FAIL, False),
        (Verdict.XFAIL, Verdict.XPASS, False),
        (Verdict.XPASS, Verdict.PASS, False),
        (Verdict.PASS, Verdict.XPASS, False),
    ],
)
def test_a_verdict_is_worse_or_not(before: Verdict, after: Verdict, worse: bool) -> None:
    change = only(of(record(verdict=before), record(verdict=after, reason="out: wrong\nmore")))
    assert (change.kind, change.before, change.after, change.worse) == (Aspect.VERDICT, before, after, worse)
    assert change.reproduction.endswith("--accel-case=eager/mlp/cpu/float32/forward")


@pytest.mark.parametrize("after", [Verdict.UNSUPPORTED, Verdict.UNAVAILABLE])
def test_a_case_that_does_not_run_any_more_is_lost_with_its_reason(after: Verdict) -> None:
    change = only(of(record(), record(verdict=after, reason="no torchao")))
    assert (change.kind, change.worse, change.after, change.reason) == (Aspect.LOST, True, after, "no torchao")
    back = only(of(record(verdict=after), record()))
    assert (back.kind, back.worse, back.before) == (Aspect.GAINED, False, after)


def test_a_case_that_is_not_there_any_more_is_lost_by_name() -> None:
    comparison = compare([run(record(), record("amp-bf16"))], [run(record())])
    change = only(comparison)
    assert (change.kind, change.case, change.worse) == (Aspect.LOST, "amp-bf16/mlp/cpu/float32/forward", True)
    assert change.after == "not in the run"


def test_a_device_that_is_not_there_any_more_loses_all_its_cases() -> None:
    other = run(record(device="xla"), fingerprint=replace(EPYC, device="xla"))
    comparison = compare([run(record()), other], [run(record())])
    assert [(change.kind, change.devices, change.worse) for change in comparison.changes] == [
        (Aspect.LOST, "xla -> -", True)
    ]
    gained = compare([run(record())], [run(record()), other])
    assert [(change.kind, change.worse) for change in gained.changes] == [(Aspect.GAINED, False)]


def test_what_ran_in_neither_is_no_difference() -> None:
    assert of(record(verdict=Verdict.UNSUPPORTED), record(verdict=Verdict.UNAVAILABLE)).changes == ()


def test_the_views_in_units_in_the_last_place_are_those_of_the_judge() -> None:
    assert {*RELATIVE, *ULPS} == set(VIEWS)
    assert GROWTH == SLACK


def test_an_error_has_grown_if_it_is_twice_what_it_was_and_more_than_rounding_samples_show() -> None:
    change = only(of(record(figures=(figure(1.5),)), record(figures=(figure(3.0),))))
    assert (change.kind, change.what, change.worse, change.factor) == (Aspect.ERROR, "out: row", True, 2.0)
    assert (change.before, change.after) == ("1.5 ulp", "3 ulp")


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        (1.5, 2.9, 4.0),  # less than twice
        (0.1, 1.9, 4.0),  # as large as rounding makes it
        (3.0, 1.0, 4.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_less_is_rounding(before: float, after: float, allowed: float) -> None:
    differences = of(
        record(figures=(figure(before, allowed=allowed),)), record(figures=(figure(after, allowed=allowed),))
    )
    assert differences.changes == ()


def test_an_error_where_there_was_none_has_grown_without_bound() -> None:
    differences = of(record(figures=(figure(0.0, allowed=0.0),)), record(figures=(figure(1.0, allowed=0.0),)))
    assert only(differences).factor == math.inf
    assert json.dumps(differences.as_json(), allow_nan=False)


def test_an_error_of_another_tensor_is_held_against_the_closest_one_before() -> None:
    # Before, another path was the closest to its budget, with a quarter of it: this one used no more.
    before = record(figures=(figure(2.0, "out[0]", allowed=8.0),))
    change = only(of(before, record(figures=(figure(3.0, "out[1]", allowed=4.0),))))
    assert (change.what, change.before, change.after, change.factor) == ("out[1]: row", "at most 1 ulp", "3 ulp", 3.0)
    assert not change.worse  # whether its budget was the same is not known
    assert (
        of(before, record(figures=(figure(3.0, "out[1]", allowed=6.0), figure(2.0, "out[0]", allowed=8.0)))).changes
        == ()
    )


def test_a_view_that_does_not_gate_is_shown_and_does_not_count() -> None:
    before, after = (
        figure(0.1, view="bias", allowed=0.3, gates=False),
        figure(0.3, view="bias", allowed=0.3, gates=False),
    )
    change = only(of(record(figures=(before,)), record(figures=(after,))))
    assert (change.kind, change.worse, change.after) == (Aspect.ERROR, False, "0.3 ulp")


def test_one_line_a_case_names_the_gating_view_that_has_grown_most() -> None:
    before = (figure(1.0), figure(1.0, view="column"), figure(0.1, view="bias", allowed=0.3, gates=False))
    after = (figure(3.0), figure(3.5, view="column"), figure(9.0, view="bias", allowed=0.3, gates=False))
    assert only(of(record(figures=before), record(figures=after))).what == "out: column"


def test_units_in_the_last_place_are_those_of_the_cases_dtype() -> None:
    case = replace(record().case, dtype="bfloat16")
    before, after = (
        Record(case, Verdict.PASS, figures=(Figure("out", "row", value, 2.0**-6, "", gates=True),))
        for value in (2.0**-8, 2.0**-6)
    )
    change = only(of(before, after))
    assert (change.before, change.after) == ("0.5 ulp", "2 ulp")


def timed(name: str, value: float, low: float, high: float) -> Record:
    return record(measurements=(Measurement(name, value, "s" if name == "latency" else "x", low, high),))


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        (("latency", 1.0, 0.9, 1.1), ("latency", 1.3, 1.2, 1.4), True),
        (("latency", 1.3, 1.2, 1.4), ("latency", 1.0, 0.9, 1.1), False),
        (("speed-up", 2.0, 1.9, 2.1), ("speed-up", 1.5, 1.4, 1.6), True),
        (("speed-up", 1.5, 1.4, 1.6), ("speed-up", 2.0, 1.9, 2.1), False),
    ],
)
def test_speed_counts_beyond_both_intervals(before: Any, after: Any, worse: bool) -> None:
    change = only(of(timed(*before), timed(*after)))
    assert (change.kind, change.what, change.worse) == (Aspect.SPEED, before[0], worse)


def test_a_time_counts_only_where_no_run_waited_for_a_core() -> None:
    waited = Measurement("waited", 0.7, "part")
    before, after = timed("latency", 1.0, 0.9, 1.1), timed("latency", 1.3, 1.2, 1.4)
    busy = replace(before, measurements=(*before.measurements, waited))
    change = only(of(busy, after))
    assert (change.worse, change.reason) == (False, "waited for a core 70% of the time: does not count")
    ratio = replace(
        timed("speed-up", 1.0, 0.9, 1.1), measurements=(Measurement("speed-up", 1.0, "x", 0.9, 1.1), waited)
    )
    assert only(of(timed("speed-up", 2.0, 1.9, 2.1), ratio)).worse


def test_intervals_that_touch_are_no_difference() -> None:
    assert of(timed("latency", 1.0, 0.9, 1.1), timed("latency", 1.2, 1.1, 1.3)).changes == ()
    unknown = record(measurements=(Measurement("latency", None, "s", reason="no clock"),))
    assert of(timed("latency", 1.0, 0.9, 1.1), unknown).changes == ()


def test_times_of_another_fingerprint_are_not_compared_but_ratios_are() -> None:
    newer = replace(EPYC, versions={"torch": "2.14.0"})
    comparison = compare(
        [run(timed("latency", 1.0, 0.9, 1.1))], [run(timed("latency", 3.0, 2.9, 3.1), fingerprint=newer)]
    )
    assert (comparison.changes, comparison.pairs[0].same) == ((), False)
    ratios = compare(
        [run(timed("speed-up", 2.0, 1.9, 2.1))], [run(timed("speed-up", 1.0, 0.9, 1.1), fingerprint=newer)]
    )
    assert only(ratios).worse


def test_what_is_right_on_one_device_and_not_on_the_other() -> None:
    comparison = compare(load([CPU]), load([XLA]))
    assert comparison.across
    assert (comparison.pairs[0].name, comparison.pairs[0].both) == ("cpu -> xla", 172)
    assert comparison.counts() == {
        "verdict": (26, 25), "coverage lost": (127, 0), "coverage gained": (17, 0), "error grown": (31, 0)
    }  # fmt: skip
    first = next(change for change in comparison.changes if change.worse)
    assert (first.case, first.before, first.after) == ("amp-bf16/cnn/float32/backward", "pass", "xfail")
    assert "--accel-device=xla" in first.reproduction


def test_across_compares_devices_of_one_journal() -> None:
    both = [
        run(record(device="cuda"), fingerprint=replace(EPYC, device="cuda")),
        run(record(device="rocm", verdict=Verdict.FAIL, reason="out: wrong"), fingerprint=replace(EPYC, device="rocm")),
    ]
    assert compare(both, both).changes == ()
    comparison = compare(both, both, across=True)
    assert [(change.devices, change.worse) for change in comparison.changes] == [
        ("cuda -> rocm", True),
        ("rocm -> cuda", False),
    ]


def test_a_device_is_found_again_where_another_chip_stands_beside_it() -> None:
    xeon = replace(EPYC, chip="Xeon", versions={"torch": "2.9.0"})
    comparison = compare([run(record())], [run(record()), run(record("amp-bf16"), fingerprint=xeon)])
    assert [change.kind for change in comparison.changes] == [Aspect.LOST, Aspect.GAINED, Aspect.GAINED]
    again = compare([run(record())], [run(record("eager", Verdict.FAIL), fingerprint=xeon)])
    assert only(again).kind is Aspect.VERDICT


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the CPU's journal: one case fails, one is gone, one errs 1000 times more."""
    lines = [json.loads(line) for line in CPU.read_text(encoding="utf-8").splitlines()]
    cases = [line for line in lines if line.get("verdict") == "pass" and line["case"]["technique"] == "eager"]
    cases[0] |= {"verdict": "fail", "reason": "out: view row: expected at most 1e-7, got 1e-3"}
    lines.remove(cases[1])
    match = next(figure for figure in cases[2]["figures"] if figure["view"] == "row")
    match["measured"] *= 1000
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_command_exits_with_1_if_worse(changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [f"--json={tmp_path / 'diff.json'}", f"--markdown={tmp_path / 'diff.md'}"]
    assert main(["diff", str(CPU), str(changed), *written]) == 1
    out = capsys.readouterr().out
    first = "3 changes for the worse (1 verdict, 1 coverage lost, 1 error grown); 298 cases ran in both"
    assert out.splitlines()[0] == first
    assert "reproduce the first: pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case=eager/" in out
    body = json.loads((tmp_path / "diff.json").read_text(encoding="utf-8"))
    assert (body["worse"], [change["kind"] for change in body["changes"]]) == (
        3, ["verdict", "coverage lost", "error grown"]
    )  # fmt: skip
    assert (tmp_path / "diff.md").read_text(encoding="utf-8").startswith(f"## accelcheck diff: {first}\n")


def test_the_command_exits_with_0_if_something_is_better(changed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(changed), str(CPU)]) == 0
    assert capsys.readouterr().out.startswith("nothing is worse: 298 cases ran in both\n")


def test_a_file_that_is_no_journal_is_a_wrong_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.jsonl"
    assert main(["diff", str(CPU), str(path)]) == 4
    path.write_text("[]\n")
    assert main(["diff", str(CPU), str(path)]) == 4
    assert str(path) in capsys.readouterr().err
    assert main(["diff", str(CPU), str(CPU), f"--json={tmp_path}"]) == 4


def test_a_long_difference_is_cut_on_the_screen_and_says_so() -> None:
    many = [record(f"t{i:03}") for i in range(100)]
    text = plain(difference_text.terminal(compare([run(*many)], [run(record("t000"))])))
    assert "  and 59 more: --json has all" in text
    assert len(text) < 60


def test_a_journal_cannot_write_into_the_difference() -> None:
    hostile = "`|</details><script> @everyone \x1b[2J"
    before = Record(replace(record().case, technique=hostile), Verdict.PASS)
    differences = of(before, replace(before, verdict=Verdict.FAIL, reason=hostile))
    page = difference_text.page(differences)
    assert "\x1b" not in page
    assert "\x1b" not in "\n".join(plain(difference_text.terminal(differences)))
    row = next(line for line in page.splitlines() if line.startswith("| `worse`"))
    assert row.count("`` `") == 2  # case and reason are code, which their backticks do not end
    assert len(re.findall(r"(?<!\\)\|", row)) == 7
