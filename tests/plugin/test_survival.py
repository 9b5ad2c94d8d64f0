"""Cases that crash, hang, exit or lose their device leave the verdicts of all others alone."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plugin_harness import Suite, only
from process_harness import PATIENT, descendants, left, started

from accelcheck.core.journal import Journal, JournalError
from accelcheck.core.journal_reading import read

FAILED = pytest.ExitCode.TESTS_FAILED
HEALTHY = ("toy", "toy-too", "toy-value")
DISTURBING = {
    "toy-abort": ("crash", "the process that ran it died of SIGABRT"),
    "toy-segv": ("crash", "the process that ran it died of SIGSEGV"),
    "toy-exit": ("crash", "the process that ran it ended with status 0"),
    "toy-over": ("crash", "the process that ran it ended with status 96"),
    "toy-group": ("crash", "the process that ran it died of SIGTERM"),
    "toy-parent": ("crash", "the process that ran it is gone, and so is the one that starts it"),
    "toy-hang": ("hang", "the process that ran it ran for longer than 3 s and was killed"),
    "toy-gil": ("hang", "the process that ran it ran for longer than 3 s and was killed"),
    "toy-interrupt": ("error", "KeyboardInterrupt: "),
    "toy-lost": ("device-lost", "cpu does not answer any more: RuntimeError: CUDA error: an illegal memory access"),
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.delenv("ACCELCHECK_SCRATCH", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # no debugger, which would take seconds for each hang
    return Suite(pytester, monkeypatch)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_case_that_ends_its_process_ends_nothing_else(suite: Suite, workers: str) -> None:
    undisturbed = suite.run(*only(*HEALTHY)).verdicts
    ran = suite.run(*only(*HEALTHY, *DISTURBING), "--accel-timeout=3", "-n", workers, "-p", "no:randomly")
    assert ran.ret == FAILED
    assert {case: verdict for case, verdict in ran.verdicts.items() if case in undisturbed} == undisturbed
    for technique, (verdict, reason) in DISTURBING.items():
        record = ran.record(technique)
        assert (technique, str(record.verdict)) == (technique, verdict)
        assert not record.code or verdict == "crash"
        assert record.why.startswith(reason)
        assert ran.lines(rf"{technique} +1 {verdict}")
    assert ran.record("toy-segv").code == "SIGSEGV"
    assert ran.raw[-1]["verdicts"] == {"device-lost": 1, "crash": 6, "hang": 2, "error": 1, "fail": 1, "pass": 2}
    assert {record.family for record in ran.records} == {"toy"}


@pytest.mark.slow
def test_a_hang_and_a_crash_show_where_they_were(suite: Suite) -> None:
    ran = suite.run(*only("toy-hang", "toy-gil", "toy-segv"), "--accel-timeout=1")
    assert "in hangs" in ran.record("toy-hang").traceback
    assert "in holds_the_gil" in ran.record("toy-gil").traceback
    assert "Fatal Python error: Segmentation fault" in ran.record("toy-segv").traceback
    assert "Fatal Python error: Segmentation fault" in ran.out


@pytest.mark.slow
def test_what_a_case_had_started_ends_with_it(suite: Suite) -> None:
    ran = suite.run(*only("toy-orphan", "toy"))
    assert ran.verdicts["toy/tiny/cpu/float32/forward"] == "pass"
    assert not left(int((suite.path / "orphan.pid").read_text()))


@pytest.mark.slow
def test_a_case_that_passes_in_another_process_is_flaky(suite: Suite) -> None:
    ran = suite.run(*only("toy-flaky", "toy"))
    assert ran.ret == FAILED
    record = ran.record("toy-flaky")
    assert str(record.verdict) == "flaky"
    assert [str(verdict) for verdict in record.runs] == ["error", "pass", "pass"]
    first, then = record.why.splitlines()
    assert first == "1 of 3 runs were not right; the first one: error"
    assert then == "LookupError: not this time"
    assert ran.lines("toy-flaky +1 flaky")


def test_a_case_that_fails_as_the_ledger_expects_is_not_run_again(suite: Suite) -> None:
    ledger = suite.ledger(cases=["toy-flaky/*"], verdict="error", match="not this time", at_most="LookupError")
    assert suite.run(*only("toy-flaky"), f"--accel-ledger={ledger}").verdicts == {
        "toy-flaky/tiny/cpu/float32/forward": "xfail"
    }


@pytest.mark.slow
def test_in_pytests_own_process_a_crash_ends_the_run_and_what_was_learned_stays(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(suite.path))
    words = [*only("toy", "toy-abort"), "--accel-in-process", "-p", "no:randomly"]
    ran = suite.run_apart(*words)
    assert ran.ret < 0
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}


def test_where_a_device_is_in_use_cases_run_here_and_that_shows(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.devices.cpu.Cpu.in_use", lambda _: True)
    ran = suite.run(*only("toy"))
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}
    (printed,) = [line for line in ran.out.splitlines() if "own process, which a crash or hang ends" in line]
    assert printed.endswith("cpu: in use in this process before the first case")


def test_a_disk_that_gets_full_ends_the_journal_and_not_the_run(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Journal.case
    left = [1]

    def full(journal: Journal, record: Mapping[str, Any]) -> None:
        if not left:
            raise JournalError(f"the journal {journal.path} cannot be written: No space left on device")
        left.pop()
        write(journal, record)

    monkeypatch.setattr(Journal, "case", full)
    ran = suite.run(*only("toy", "toy-too"))
    assert ran.ret == FAILED  # though both cases pass
    assert len(ran.verdicts) == 1
    assert len(ran.lines(r"toy(-too)? +1 pass")) == 2
    (printed,) = [line for line in ran.out.splitlines() if "No space left" in line]
    assert printed.endswith("cannot be written: No space left on device; it ends here, and the run goes on")


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_but_the_journal_is_left_of_a_run_whose_controller_is_ended(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, workers: str, number: signal.Signals
) -> None:
    folder = suite.path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    words = [*only("toy", "toy-gil"), "--accel-timeout=0", "--accel-journal=journal.jsonl"]
    words += ["-n", workers, "-p", "no:randomly"]
    journal = suite.path / "journal.jsonl"
    with started([sys.executable, "-m", "pytest", "--pyargs", "accelcheck.suite", *words]) as run:
        limit = time.monotonic() + PATIENT
        while (
            time.monotonic() < limit
            and run.poll() is None
            and not (journal.exists() and journal.read_text().count("\n") >= 2)
        ):
            time.sleep(0.05)
        time.sleep(1.0)  # the next case holds the GIL
        below = descendants(run.pid)
        assert len(below) >= 3
        assert [*folder.glob("accelcheck-*")]
        run.send_signal(number)
        run.wait(timeout=PATIENT)
        assert left(*below, seconds=10.0) == []
    for _ in range(1000):
        if not [*folder.glob("accelcheck-*")]:
            break
        time.sleep(0.01)
    assert [*folder.glob("accelcheck-*")] == []
    _, records = read(journal)
    assert [(record.case.technique, str(record.verdict)) for record in records] == [("toy", "pass")]


@pytest.mark.parametrize("technique", [pytest.param("toy-holder", marks=pytest.mark.slow), "toy-worker"])
@pytest.mark.slow
def test_a_worker_that_dies_is_noticed_though_others_hold_its_pipe(suite: Suite, technique: str) -> None:
    here = ["--accel-in-process"] if technique == "toy-holder" else []
    ran = suite.run(*only(*HEALTHY, technique), "-n", "2", *here)
    assert ran.ret == FAILED
    assert ran.verdicts.pop(f"{technique}/tiny/cpu/float32/forward") == "crash"
    assert {str(ran.record(name).verdict) for name in HEALTHY} == {"pass", "fail"}
    if technique == "toy-holder":
        assert not left(int((suite.path / "holder.pid").read_text()))
