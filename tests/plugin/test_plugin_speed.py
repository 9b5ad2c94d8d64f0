"""Timed cases as users run them: options, baselines, limits, traces, pytest-benchmark; toy workloads, few processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from plugin_harness import Ran, Suite, reaches
from process_harness import started

TIMED = "toy/timed/cpu/float32/speed"
QUICK = ("--accel-technique=toy", "--accel-workload=timed", "--accel-device=cpu", "--accel-dtype=float32")

SLEEPING = """

def pytest_collection_modifyitems():
    import os, time
    if "ACCELCHECK_TIMING_FILE" in os.environ:
        with open("pid.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid.new", "pid")
        time.sleep(600)
"""


def timed(suite: Suite, *arguments: str) -> Ran:
    return suite.run(*QUICK, *arguments)


def measured(ran: Ran) -> dict[str, float | None]:
    (record,) = ran.records
    return {m.name: m.value for m in record.measurements}


def stored(suite: Suite) -> list[Path]:
    return sorted(suite.path.glob("baselines/*/*/*.json"))


@pytest.mark.slow
def test_a_timed_case_is_judged_and_measured(suite: Suite) -> None:
    ran = timed(suite)
    assert ran.verdicts == {TIMED: "pass"}
    comparison = measured(ran)
    names = "latency speed-up first-call-cold first-call-warm peak-memory launches throughput"
    assert set(names.split()) <= set(comparison)
    assert comparison["peak-memory"] == comparison["peak-memory-fp32-eager"] == 5 * 3 * 4  # rows, columns, bytes
    assert comparison["parameters"] == (4 * 3 + 3) * 4
    (record,) = ran.records
    assert len(record.times) >= 9
    assert record.compared == 15
    assert any(line.startswith("toy ") and " 100 % " in line for line in ran.out.splitlines())


@pytest.mark.slow
def test_what_is_wrong_is_neither_timed_nor_stored(suite: Suite) -> None:
    ran = suite.run("--accel-technique=toy-value", *QUICK[1:], "--accel-baseline=new-only", "--accel-processes=2")
    (record,) = ran.records
    assert str(record.verdict) == "fail"
    assert record.measurements == ()
    assert not stored(suite)


@pytest.mark.slow
def test_workers_do_not_time(suite: Suite) -> None:
    ran = suite.run_apart(*QUICK, "-n", "1", "-rs")
    assert ran.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert ran.records == []
    assert "timing needs the machine for itself: run accelcheck.suite.test_speed without -n" in ran.out


@pytest.mark.slow
def test_baselines_are_stored_held_and_a_slowdown_is_named(suite: Suite) -> None:
    ran = timed(suite, "--accel-baseline=update", "--accel-processes=2")
    assert ran.ret == 0
    assert "accelcheck: timing 1 cases in a process of its own, 2 of 2" in ran.out
    (path,) = stored(suite)
    data = json.loads(path.read_text())
    assert data["case"] == TIMED
    assert data["ratio"]["processes"] == 2
    # As if it had been a tenth of it: what is measured now is a regression, whatever the machine does.
    data["ratio"] = {"mean": -3.0, "spread": 0.001, "processes": 10}
    path.write_text(json.dumps(data))
    ran = timed(suite, "--accel-baseline=check", "--accel-processes=2")
    assert ran.verdicts == {TIMED: "fail"}
    assert "regression: time: expected at most" in ran.out
    (command,) = set(
        ran.lines("  reproduce: .*")
    )  # under CI=true pytest repeats the whole message in its short summary
    folder = suite.path / "baselines"
    assert command.endswith(f"--accel-baseline=check --accel-baselines={folder} --accel-processes=2")
    # What is known to be one is expected to be.
    ledger = suite.ledger(cases=["toy/timed/*"], match="^regression: ")
    ran = timed(suite, "--accel-baseline=check", "--accel-processes=2", f"--accel-ledger={ledger}")
    assert ran.verdicts == {TIMED: "xfail"}
    # And as if it had been ten times of it.
    data["ratio"] = {"mean": 3.0, "spread": 0.001, "processes": 10}
    path.write_text(json.dumps(data))
    ran = timed(suite, "--accel-baseline=check", "--accel-processes=2")
    assert ran.verdicts == {TIMED: "pass"}
    assert "compared with baselines: 1 of 1 cases" in ran.out
    assert (suite.path / "baselines").is_dir()


LEADING = """
import time
import torch
from torch import nn
from accelcheck.api import SUPPORTED, Evidence, Mode, Problem, Technique, Workload

class Sleeping(nn.Module):
    seconds = 0.004

    def forward(self, x):
        time.sleep(self.seconds)
        return x + 1

class Awake(Technique):
    name, family, promise, source = "awake", "toy", "None.", "https://example.invalid"

    def capability(self, device):
        return SUPPORTED

    def prepare(self, program, mode, device):
        program.module.seconds = 0.002

    def evidence(self, program, log, mode, device):
        yield Evidence("it sleeps less", program.module.seconds, engaged=True)

def pytest_accel_techniques():
    return [Awake()]

def pytest_accel_workloads():
    make = lambda generator, extent: Problem(Sleeping(), (torch.randn(3, 4, generator=generator),))
    return [Workload("sleeping", "A pause.", make, modes=frozenset({Mode.FORWARD, Mode.SPEED}))]
"""


@pytest.mark.slow
def test_what_is_faster_is_timed_by_further_processes_and_written_once(suite: Suite) -> None:
    suite.pytester.makeconftest(LEADING)
    words = ("--accel-technique=awake", "--accel-workload=sleeping", "--accel-device=cpu", "--accel-dtype=float32")
    ran = suite.run_apart(*words, "--accel-processes=2", "--junitxml=x.xml")
    tests = ET.parse(suite.path / "x.xml").iter("testcase")
    skipped = {test.get("name") for test in tests if test.find("skipped") is not None}
    assert not any("sleeping" in str(name) for name in skipped), skipped  # a timing process skips all cases
    assert ran.verdicts == {f"awake/sleeping/cpu/float32/{mode}": "pass" for mode in ("forward", "speed")}
    speed = next(m for record in ran.records for m in record.measurements if m.name == "speed-up")
    assert ", in 3 processes: " in speed.reason
    assert speed.low is not None
    assert 1.0 < speed.low < 2.5
    assert "accelcheck: timing 1 cases in a process of its own, 2 of 2" in ran.out


@pytest.mark.slow
def test_what_the_ledger_expects_to_fail_is_not_stored_when_it_passes(suite: Suite) -> None:
    ledger = suite.ledger(cases=["toy/timed/*"])
    ran = timed(suite, "--accel-baseline=update", "--accel-processes=2", f"--accel-ledger={ledger}")
    assert ran.verdicts == {TIMED: "xpass"}
    assert not stored(suite)


@pytest.mark.slow
def test_a_case_that_no_process_could_time_has_its_own_verdict(suite: Suite) -> None:
    ran = suite.run("--accel-technique=toy-prepare", *QUICK[1:], "--accel-baseline=new-only", "--accel-processes=2")
    assert ran.ret == pytest.ExitCode.TESTS_FAILED
    (record,) = ran.records
    assert (str(record.verdict), record.why) == ("error", "LookupError: no such pass")


@pytest.mark.slow
def test_a_case_that_ends_the_processes_that_time_it_is_a_crash_and_not_run_again(suite: Suite) -> None:
    ran = timed(suite, "--accel-technique=toy-process", "--accel-baseline=new-only", "--accel-processes=2")
    assert ran.verdicts == {TIMED: "pass", TIMED.replace("toy", "toy-process"): "crash"}
    crash = next(record for record in ran.records if record.case.technique == "toy-process")
    assert crash.reason == "a process that timed it died of SIGABRT"
    (path,) = stored(suite)
    assert json.loads(path.read_text())["ratio"]["processes"] == 2


@pytest.mark.slow
def test_what_failed_last_is_remembered_when_processes_time(suite: Suite) -> None:
    test = (
        "import pytest\n@pytest.mark.accel({mode!r})\ndef test_{mode}(accel_case, accel_check): accel_check(accel_case)"
    )
    suite.pytester.makepyfile(**{f"test_remembered_{mode}": test.format(mode=mode) for mode in ("forward", "speed")})
    wrong = ("--accel-technique=toy-value", "--accel-workload=tiny", *QUICK[1:])
    for words in ([], ["--lf", "--accel-baseline=update", "--accel-processes=2"]):
        result = suite.inside(*wrong, *words)
        result.assert_outcomes(failed=2)
        result.stdout.no_fnmatch_line("*before the first of them*")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_a_run_that_is_killed_leaves_no_process_that_times(suite: Suite) -> None:
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text() + SLEEPING)
    words = ["--pyargs", "accelcheck.suite.test_speed", *QUICK, "--accel-baseline=update", "--accel-processes=2"]
    with started([sys.executable, "-m", "pytest", *words], stdout=subprocess.DEVNULL) as run:
        for _ in range(2400):
            if (suite.path / "pid").exists() or run.poll() is not None:
                break
            time.sleep(0.05)
        stat = Path("/proc", (suite.path / "pid").read_text(), "stat")
        assert reaches(stat, "S")
        run.kill()
        run.wait()
        assert reaches(stat, "Z", "gone")


@pytest.mark.slow
def test_cases_that_a_mark_skips_are_not_timed(suite: Suite) -> None:
    conftest = suite.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + "\nimport pytest\ndef pytest_collection_modifyitems(items):\n"
        + "    for item in items:\n        item.add_marker(pytest.mark.skip(reason='not today'))\n"
    )
    ran = timed(suite, "--accel-baseline=update", "--accel-processes=2")
    assert ran.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert ran.records == []
    assert not stored(suite)


def test_nothing_is_timed_for_a_device_that_is_absent(suite: Suite) -> None:
    ran = suite.run(
        *("--accel-technique=toy", "--accel-workload=timed", "--accel-device=cuda", "--accel-dtype=float32"),
        *("--accel-baseline=update", "--accel-processes=2"),
    )
    assert ran.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "in a process of its own" not in ran.out


def test_baselines_that_cannot_be_stored_end_the_run_before_any_case(suite: Suite) -> None:
    (suite.path / "file").write_text("")
    ran = timed(suite, "--accel-baseline=update", "--accel-baselines=file")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert "file: expected a folder that can be written" in ran.err
    assert ran.records == []


@pytest.mark.slow
def test_a_limit_that_no_case_has_a_figure_for_is_said(suite: Suite) -> None:
    limit = '[[limit]]\ncases = ["tyo/*"]\nmemory-at-most = 0.5\nreason = "mistyped"\n'
    (suite.path / "limits.toml").write_text(f"schema = 1\n{limit}")
    ran = timed(suite, "--accel-limits=limits.toml")
    assert ran.ret == 0
    assert "limit: memory-at-most 0.5 of tyo/*: no timed case has this figure" in ran.out


@pytest.mark.slow
def test_no_baseline_is_said(suite: Suite) -> None:
    ran = timed(suite, "--accel-baseline=check", "--accel-processes=2", "--accel-baselines=elsewhere")
    assert ran.ret == 0
    assert "baseline: no baseline for cpu-toy-processor-x2/torch-2-aten: store one" in ran.out
    assert "in a process of its own" not in ran.out  # there is nothing to hold it against


@pytest.mark.slow
def test_a_spoilt_baseline_ends_the_run_before_any_case(suite: Suite) -> None:
    path = suite.path / "baselines/cpu-toy-processor-x2/torch-2-aten/x-0.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    ran = timed(suite, "--accel-baseline=check")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert str(path) in ran.err
    assert ran.records == []
    assert timed(suite).ret == 0  # off: not read


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--accel-baseline=chek", "unknown use of baselines 'chek'. Did you mean 'check'?"),
        ("--accel-baseline=", "unknown use of baselines ''. Legal values: "),
        ("--accel-processes=1", "unknown number of processes '1'. Legal values: a whole number of at least 2."),
        ("--accel-processes=ten", "unknown number of processes 'ten'"),
        ("--accel-limits=absent.toml", "absent.toml"),
    ],
)
def test_wrong_options_are_answered(suite: Suite, option: str, named: str) -> None:
    ran = timed(suite, option)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert named in ran.err


@pytest.mark.slow
def test_a_broken_limit_fails_the_case(suite: Suite) -> None:
    limit = '[[limit]]\ncases = ["toy/*"]\nspeed-up-at-least = 1000\nreason = "it was promised"\n'
    (suite.path / "limits.toml").write_text(f"schema = 1\n{limit}")
    ran = timed(suite, "--accel-limits=limits.toml")
    assert ran.verdicts == {TIMED: "fail"}
    assert "speed up: expected at least 1000" in ran.out
    assert "it was promised" in ran.out


@pytest.mark.slow
def test_a_trace_is_kept(suite: Suite) -> None:
    timed(suite, "--accel-profile=traces")
    (path,) = (suite.path / "traces").glob("*.json")
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::addmm" in names


@pytest.mark.slow
def test_pytest_benchmark_shows_what_was_timed(suite: Suite) -> None:
    ran = timed(suite, "--benchmark-json=benchmark.json")
    data = json.loads((suite.path / "benchmark.json").read_text())
    (shown,) = data["benchmarks"]
    (record,) = ran.records
    assert shown["group"] == "timed/cpu/speed"
    assert shown["stats"]["rounds"] == len(record.times)
    assert shown["stats"]["median"] == pytest.approx(sorted(record.times)[len(record.times) // 2], rel=0.2)
    assert shown["extra_info"]["speed-up"] == measured(ran)["speed-up"]
    assert data["machine_info"]["accelcheck"]["cpu"]["chip"] == "Toy processor"


@pytest.mark.slow
def test_pytest_benchmark_can_choose_and_is_not_needed(suite: Suite) -> None:
    assert timed(suite, "--benchmark-only").verdicts == {TIMED: "pass"}
    assert timed(suite, "--benchmark-skip").verdicts == {}
    assert timed(suite, "-p", "no:benchmark").verdicts == {TIMED: "pass"}
