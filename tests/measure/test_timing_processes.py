"""Processes that time: what is taken of those that measure, die or hang. They are stubs that say what a test wants."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from accelcheck.core.processes import End
from accelcheck.measure import timing_processes
from accelcheck.measure.timing_processes import Timed, TimingError

STUB = """#!{python}
import json, os, sys, time
from pathlib import Path

path = Path(os.environ["ACCELCHECK_TIMING_FILE"])
wanted = json.loads(path.read_text())
messages = Path(os.environ["ACCELCHECK_MESSAGES"])
with (path.parent / "asked").open("a") as asked:
    asked.write(json.dumps([wanted, sys.argv[1:]]) + chr(10))
print("about to begin", flush=True)
number = path.name.split("-")[1]
if {plan!r}.get("exit") == int(number):
    sys.exit("no such plugin")
if {plan!r}.get("skips"):
    sys.exit(0)
for case in wanted:
    does = {plan!r}.get(case, 0.5)
    with messages.open("a") as file:
        file.write(json.dumps(dict(case=case, ratio=None)) + chr(10))
        file.flush()
        if does == "die":
            os.kill(os.getpid(), 9)
        if does == "hang":
            time.sleep(600)
        if does == "half":
            file.write('{{"case": "' + case)
            file.flush()
            os._exit(3)
        outcome = dict(reason=does) if isinstance(does, str) else dict(ratio=does)
        file.write(json.dumps(dict(case=case, **outcome)) + chr(10))
"""


class Stubbed:
    """Times three cases by a stub in place of the interpreter."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.said: list[str] = []

    def measure(self, count: int = 3, cases: tuple[str, ...] = ("a", "b", "c"), **plan: object) -> dict[str, Timed]:
        stub = self.folder / "python"
        stub.write_text(STUB.format(python=sys.executable, plan=plan))
        stub.chmod(0o755)
        self.monkeypatch.setattr(sys, "executable", str(stub))
        return timing_processes.measure(["--some"], cases, count, self.folder, self.folder, self.said.append)

    def asked(self) -> list[list[str]]:
        return [json.loads(line)[0] for line in (self.folder / "asked").read_text().splitlines()]


def timed(*ratios: float, asked: int = 3) -> Timed:
    """The stub says nothing of waiting."""
    return Timed(ratios, waited=(0.0,) * len(ratios), asked=asked)


@pytest.fixture
def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubbed:
    return Stubbed(tmp_path, monkeypatch)


def test_each_process_runs_the_command_again_and_gives_a_ratio(stubbed: Stubbed) -> None:
    measurements = stubbed.measure(2, b=2.0)
    assert measurements == {case: timed(ratio, ratio, asked=2) for case, ratio in (("a", 0.5), ("b", 2.0), ("c", 0.5))}
    assert stubbed.said == [f"timing 3 cases in a process of its own, {number} of 2" for number in (1, 2)]
    lines = [json.loads(line) for line in (stubbed.folder / "asked").read_text().splitlines()]
    for number, (cases, words) in enumerate(lines, 1):
        assert cases == ["a", "b", "c"]
        assert words[:5] == ["-m", "pytest", "--some", "--accel-resume=", "--accel-baseline=off"]
        assert words[5] == f"--accel-journal={stubbed.folder / f'process-{number}-3.journal'}"


def test_what_each_process_waited_for_a_core_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = iter([0.01, 0.4, 0.02])

    def run(*_: object) -> tuple[End, str, dict[str, timing_processes.CaseReport]]:
        return End(0), "", {"a": (0.5, next(parts))}

    monkeypatch.setattr(timing_processes, "_run_process", run)
    measurements = timing_processes.measure([], ["a"], 3, tmp_path, tmp_path, lambda _: None)
    assert measurements == {"a": Timed((0.5, 0.5, 0.5), waited=(0.01, 0.4, 0.02), asked=3)}


def test_a_case_that_has_no_ratio_says_why(stubbed: Stubbed) -> None:
    assert stubbed.measure(b="no such kernel")["b"] == Timed((), "no such kernel", asked=3)
    assert stubbed.asked() == [["a", "b", "c"]] * 3  # it may have one next time


@pytest.mark.parametrize("how", ["die", "half"])
def test_what_ends_a_process_is_left_out_and_takes_no_other_along(stubbed: Stubbed, how: str) -> None:
    measurements = stubbed.measure(b=how)
    end = End(-signal.SIGKILL) if how == "die" else End(3)
    assert str(end) == ("died of SIGKILL" if how == "die" else "ended with status 3")
    assert measurements["b"] == Timed((), f"a process that timed it {end}", asked=3, ended=end)
    assert measurements["a"] == measurements["c"] == timed(0.5, 0.5, 0.5)
    assert stubbed.asked() == [["a", "b", "c"], ["c"], ["a", "c"], ["a", "c"]]
    assert f"b: the process that timed it {end}; it is left out from now on" in stubbed.said


def test_two_that_end_a_process_leave_the_third_its_processes(stubbed: Stubbed) -> None:
    assert stubbed.measure(a="die", b="die")["c"] == timed(0.5, 0.5, 0.5)


@pytest.mark.slow
def test_what_hangs_is_ended_and_left_out(stubbed: Stubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_processes, "SILENCE", 2.0)
    measurements = stubbed.measure(b="hang")
    why = "a process that timed it was silent for 2 s and was killed"
    assert measurements["b"] == Timed((), why, asked=3, ended=End(-signal.SIGKILL, 2.0, silent=True))
    assert measurements["c"] == timed(0.5, 0.5, 0.5)


def test_nothing_is_started_when_nothing_is_left(stubbed: Stubbed) -> None:
    (measurements,) = stubbed.measure(cases=("a",), a="die").values()
    assert measurements.ended == End(-signal.SIGKILL)
    assert len(stubbed.asked()) == 1


def test_a_first_process_that_comes_to_no_case_is_an_error_with_what_it_printed(stubbed: Stubbed) -> None:
    with pytest.raises(TimingError) as raised:
        stubbed.measure(exit=1)
    expected = (
        "a process that was to time 3 cases ended with status 1 before the first of them:\n"
        "about to begin\nno such plugin"
    )
    assert str(raised.value) == expected


def test_a_later_process_that_times_no_case_does_not_affect_earlier_ones(stubbed: Stubbed) -> None:
    assert stubbed.measure(exit=2) == dict.fromkeys("abc", timed(0.5, 0.5))
    assert (
        "a process that was to time 3 cases ended with status 1 before the first of them: the others count"
        in stubbed.said
    )


def test_cases_that_a_mark_skips_are_not_timed_and_no_error(stubbed: Stubbed) -> None:
    assert stubbed.measure(skips=True) == dict.fromkeys("abc", timed())


@pytest.mark.parametrize(
    ("ratios", "asked", "lacks"),
    [(0, 2, True), (1, 2, True), (2, 2, False), (1, 3, True), (2, 3, False), (5, 10, True), (6, 10, False)],
)
def test_a_sample_is_of_more_than_half_the_processes(ratios: int, asked: int, lacks: bool) -> None:
    result = Timed((0.5,) * ratios, "out of memory", asked=asked)
    assert result.lacking == (f"{ratios} of {asked} processes measured it: out of memory" if lacks else "")


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('{"case": "a", "ratio": 0.5, "waited": 0.25}', (0.5, 0.25)),
        ('{"case": "a", "ratio": null}', None),
        ('{"case": "a", "reason": "why"}', "why"),
        ('{"case": "a", "ratio": NaN}', "expected a positive ratio, got nan"),
        ('{"case": "a", "ratio": -1.0}', "expected a positive ratio, got -1.0"),
    ],
)
def test_reports_are_read_by_schema(line: str, read: Any) -> None:
    assert timing_processes.read([json.loads(line), {"case": 1}, {"case": "b", "waited": "x"}]) == {"a": read}


def test_the_last_report_of_a_case_counts(capsys: pytest.CaptureFixture[str]) -> None:
    for came in (None, "why", (0.25, 0.5)):
        timing_processes.report("a", came)
    timing_processes.report("b")
    lines = capsys.readouterr().out.splitlines()
    assert timing_processes.read(map(json.loads, lines)) == {"a": (0.25, 0.5), "b": None}


def test_a_timing_process_is_recognised_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing_processes.ongoing() is None
    monkeypatch.setenv(timing_processes.VARIABLE, "here")
    assert timing_processes.ongoing() == os.environ[timing_processes.VARIABLE]
