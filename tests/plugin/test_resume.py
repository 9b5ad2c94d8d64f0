"""A run that was cut off goes on where it stopped, and only that one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plugin_harness import JOURNAL, Ran, Suite, only

OK, FAILED, USAGE = pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.USAGE_ERROR
NAMES = ("toy", "toy-too", "toy-value")
RESUME = f"--accel-resume={JOURNAL}"


def cut(path: Path, lines: int) -> None:
    """Leave the first lines, and a torn one."""
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:lines]) + kept[lines][:20])


def resumed(suite: Suite, *words: str) -> Ran:
    return suite._ran(suite.inside("--pyargs", "accelcheck.suite", RESUME, *words))


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_goes_on_where_it_stopped(suite: Suite, workers: str) -> None:
    words = [*only(*NAMES), "-n", workers, "-p", "no:randomly"]
    whole = suite.run(*words)
    cut(suite.path / JOURNAL, 2)
    before = (suite.path / JOURNAL).read_text().splitlines()[:2]
    ran = resumed(suite, *words)
    assert ran.verdicts == whole.verdicts
    assert (suite.path / JOURNAL).read_text().splitlines()[:2] == before
    assert [line["kind"] for line in ran.raw] == ["run", "case", "resumed", "case", "case", "end"]
    assert ran.ret == whole.ret == FAILED
    assert ran.raw[-1]["verdicts"] == {"fail": 1, "pass": 2}
    assert len(ran.lines(r"toy\S* +1 (pass|fail)")) == 3  # the matrix shows both parts


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("names", "status"), [(("toy",), OK), (("toy-value",), FAILED)])
def test_a_run_that_was_finished_has_its_status_again(suite: Suite, names: tuple[str, ...], status: int) -> None:
    assert suite.run(*only(*names)).ret == status
    assert resumed(suite, *only(*names)).ret == status


def test_another_selection_is_refused_and_the_journal_stays_as_it_was(suite: Suite) -> None:
    suite.run(*only("toy"))
    before = (suite.path / JOURNAL).read_bytes()
    ran = resumed(suite, *only("toy", "toy-too"))
    assert ran.ret == USAGE
    assert "which is of another run: selection.techniques was ['toy'], and is ['toy', 'toy-too']; run with" in ran.err
    assert (suite.path / JOURNAL).read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"torch":"2"', '"torch":"1.0"', "devices.cpu.fingerprint.versions.torch was '1.0', and is '2'"),
        ('"schema":3', '"schema":2', "which an older accelcheck has written"),
    ],
    ids=["another device", "the version before"],
)
def test_another_journal_is_refused(suite: Suite, old: str, new: str, message: str) -> None:
    suite.run(*only("toy"))
    path = suite.path / JOURNAL
    header, *rest = path.read_text().splitlines()
    header = json.dumps(json.loads(header), separators=(",", ":"))
    assert old in header
    path.write_text("\n".join([header.replace(old, new), *rest, ""]))
    ran = resumed(suite, *only("toy"))
    assert ran.ret == USAGE
    assert message in ran.err


def test_what_is_no_journal_is_refused(suite: Suite) -> None:
    (suite.path / JOURNAL).write_text("[]\n")
    done = suite.inside("--pyargs", "accelcheck.suite", RESUME, *only("toy"))
    assert done.ret == USAGE
    assert f"{JOURNAL}:1: Expected `object`, got `array`" in done.stderr.str()


def test_two_journals_are_refused(suite: Suite) -> None:
    ran = resumed(suite, *only("toy"), "--accel-journal=other.jsonl")
    assert ran.ret == USAGE
    assert "unknown journal beside --accel-resume" in ran.err
