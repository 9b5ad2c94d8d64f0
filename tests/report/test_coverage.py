"""A run's account of itself: its plan, its progress, and at the end what it did not look at."""

from __future__ import annotations

import pytest
from plugin_harness import CONFTEST, Suite, only

from accelcheck.core.capability import Code, unavailable
from accelcheck.core.case import Mode
from accelcheck.core.selection import Selection
from accelcheck.report.coverage import WIDTH, Scope, deeper
from accelcheck.report.progress import Progress, rough
from accelcheck.techniques.matrix import Matrix

MARK = "not looked at:"


def last(out: str) -> list[str]:
    """The lines of the last section."""
    lines = out.partition(f"\n{MARK}\n")[2].splitlines()
    return [line.strip() for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("  "))]]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-q",),
        pytest.param(("-n", "1"), marks=pytest.mark.slow),
        pytest.param(("-n", "1", "-q"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_line_says_what_is_going_to_run(suite: Suite, words: tuple[str, ...]) -> None:
    ran = suite.run(*only("toy", "toy-too"), "--accel-device=xla", *words)
    line = (
        "accelcheck: level 1: 2 cases on cpu (Toy processor), 2 cases on xla (absent: they are skipped); "
        "techniques: 2, workloads: 1"
    )
    assert ran.lines(line.replace("(", r"\(").replace(")", r"\)")) == [line]


def test_collecting_alone_prints_no_line_of_ours(suite: Suite) -> None:
    assert not suite.run(*only("toy"), "--collect-only", "-q").lines("accelcheck: .*")


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_the_summary_ends_with_what_was_not_looked_at(suite: Suite, workers: str) -> None:
    ran = suite.run(*only("toy"), "--accel-device=xla", "-n", workers, "-p", "no:randomly")
    total = len(Matrix.load().cases(Selection(("cpu",), level=4)))
    first, *others = last(ran.out)
    before, _, command = first.partition(": pytest ")
    head, _, count = before.partition(" of 4: ")
    assert head == "cpu, level 1"
    assert int(count.split()[2].replace(",", "")) > total  # the toys are cases too
    assert count.split()[0] == "1"
    assert before.endswith(" cases; level 2 adds 1")
    assert command.endswith(" -p no:randomly --accel-level=2")
    assert "--accel-technique=toy " in command
    absent = next(line for line in others if line.startswith("absent devices: "))
    assert "xla: the package torch_xla is not installed" in absent
    assert "cuda: no NVIDIA GPU found; " in absent
    assert len(others) < 11


def test_techniques_that_executed_nothing_are_counted_by_reason(suite: Suite) -> None:
    result = last(suite.run("--accel-device=cpu", "--accel-technique=tensorrt*", "--accel-level=2").out)
    assert "techniques without an executed case: 3 of 3: 3 no-backend" in result


def test_devices_that_are_present_and_not_selected_are_named(suite: Suite) -> None:
    result = last(suite.run(*only("toy", device="xla")).out)
    assert "devices that are present and not selected: cpu" in result


@pytest.mark.slow
def test_the_command_of_a_nox_session_is_the_session(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELCHECK_SESSION", "nox -s cpu -- -k toy")
    assert last(suite.run(*only("toy")).out)[0].endswith(": ACCELCHECK_LEVEL=2 nox -s cpu -- -k toy")


@pytest.mark.slow
def test_timed_cases_that_workers_leave_out_are_named(suite: Suite) -> None:
    ran = suite.run(*only("toy", workload="tiny"), "--accel-workload=timed", "-n", "1")
    assert (
        "timed cases: not run, because workers would disturb them; run accelcheck.suite.test_speed without -n"
        in last(ran.out)
    )


@pytest.mark.slow
def test_an_exact_case_is_counted_and_no_level_is_proposed(suite: Suite) -> None:
    first = last(suite.run("--accel-device=cpu", "--accel-case=toy/tiny/cpu/float32/forward").out)[0]
    assert first.startswith("cpu, level 1 of 4: 1 of ")
    assert first.endswith(" cases, selected by --accel-case")


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_is_among_what_is_absent(suite: Suite) -> None:
    ran = suite.run_apart(*only("toy"), "--accel-import=vendor_nonsuch")
    absent = next(line for line in last(ran.out) if line.startswith("absent devices: "))
    assert "--accel-import=vendor_nonsuch: ModuleNotFoundError: No module named 'vendor_nonsuch'" in absent


@pytest.mark.slow
def test_a_long_reason_is_cut_at_its_first_line_and_width(suite: Suite) -> None:
    suite.answer(xla=unavailable(Code.NO_PACKAGE, "y" * 200 + "\nand more"))
    absent = next(line for line in last(suite.run(*only("toy")).out) if line.startswith("absent devices: "))
    assert f"{'y' * (WIDTH - 3)}..." in absent
    assert "y" * WIDTH not in absent
    assert "and more" not in absent


def test_the_deeper_command_has_one_level() -> None:
    words = ["--accel-level", "2", "-q", "--accel-level=1", "-k", "a b"]
    assert deeper(Selection(("cpu",), level=2), words, "") == "pytest -q -k 'a b' --accel-level=3"
    assert deeper(Selection(("cpu",), level=4), words, "") == ""
    assert deeper(Selection(("cpu",)), [], "nox -s xla") == "ACCELCHECK_LEVEL=2 nox -s xla"


def test_a_scope_travels_as_json() -> None:
    scope = Scope(7, (1, 2, 3, 4), 5, ("a/b/cpu/float32/forward",), 6)
    assert Scope.from_json(scope.as_json()) == scope


def test_progress_waits_for_its_interval_and_tells_percentage_and_the_time_left() -> None:
    progress = Progress([Mode.FORWARD] * 100, 0.0)
    assert [progress.finish(Mode.FORWARD, float(second)) for second in range(1, 10)] == [None] * 9
    assert progress.finish(Mode.FORWARD, 10.0) == "10 % of 100 cases, about 1 min 30 s left"
    assert progress.finish(Mode.FORWARD, 11.0) is None


def test_progress_of_a_long_run_is_told_about_50_times() -> None:
    progress = Progress([Mode.FORWARD] * 5000, 0.0)
    lines = [progress.finish(Mode.FORWARD, float(second)) for second in range(1, 5001)]
    assert 45 <= sum(line is not None for line in lines) <= 55
    assert lines[-1] is None


def test_progress_averages_all_cases_and_weighs_slow_modes() -> None:
    progress = Progress([Mode.FORWARD] * 60, 0.0)
    for second in range(1, 21):
        progress.finish(Mode.FORWARD, float(second))
    for number in range(1, 21):
        progress.finish(Mode.FORWARD, 20.0 + 3.0 * number)
    assert progress.left() == pytest.approx(20 * 80.0 / 40)
    slow = Progress([Mode.TRAJECTORY, *[Mode.FORWARD] * 20], 0.0)
    slow.finish(Mode.TRAJECTORY, 100.0)
    assert slow.left() == pytest.approx(200.0)


@pytest.mark.slow
def test_progress_is_written_while_a_run_goes(suite: Suite) -> None:
    suite.pytester.makeconftest(
        f"{CONFTEST}\nimport accelcheck.report.progress\naccelcheck.report.progress.INTERVAL = 0.0\n"
    )
    for workers in ("0", "1"):
        ran = suite.run_apart(*only("toy", "toy-too"), "-q", "-n", workers, "-p", "no:randomly")
        assert ran.lines(r"accelcheck: 50 % of 2 cases, about \d+ s left"), ran.out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (42.4, "42 s"), (60, "1 min"), (72, "1 min 10 s"), (3599, "1 h"), (5400, "1 h 30 min")],
)
def test_rough_times(seconds: float, text: str) -> None:
    assert rough(seconds) == text
