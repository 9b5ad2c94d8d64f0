"""``--accel-explain``: the first failure of each cause is explained at the end of a run, and the report has the text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from plugin_harness import Suite
from test_own_fixture import WRONG

from accelcheck import cli
from accelcheck.plugin import explanations

if TYPE_CHECKING:
    from pathlib import Path

CASE = "wrong/mlp/cpu/float32/forward"
WORDS = ("--accel-device=cpu", "--accel-technique=wrong", "--accel-workload=mlp")


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    made = Suite(pytester, monkeypatch)
    pytester.makeconftest(WRONG)
    return made


def run(suite: Suite, *words: str) -> pytest.RunResult:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "accelcheck.suite",
        "-q",
        "-p",
        "no:cacheprovider",
        *WORDS,
        *words,
    ]
    return suite.pytester.run(*command)


def test_one_case_of_each_cause_is_explained_and_the_report_says_why(suite: Suite) -> None:
    result = run(suite, "--accel-explain", "--accel-journal=j.jsonl")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    folder: Path = suite.path / "j-explained"
    (text,) = folder.glob("*.txt")
    result.stdout.fnmatch_lines([f"accelcheck: explaining {CASE}", "explained:", f"*{text}"])
    assert "=> technique" in text.read_text(encoding="utf-8")
    assert cli.main(["report", str(suite.path / "j.jsonl"), "-o", str(suite.path / "r.html")]) == 0
    page = (suite.path / "r.html").read_text(encoding="utf-8")
    assert f"Why {CASE} fails" in page
    assert "=&gt; technique" in page


def test_it_needs_a_journal_to_write_beside(suite: Suite) -> None:
    result = run(suite, "--accel-explain")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--accel-explain writes beside the journal of the run: give --accel-journal=FILE too"]
    )


def test_what_there_is_no_time_for_is_counted(suite: Suite) -> None:
    run(suite, "--accel-journal=j.jsonl")
    begun: list[str] = []
    said = list(explanations.explain(suite.path / "j.jsonl", (), 0.0, begun.append))
    assert not begun
    assert said == ["1 of 1 causes: no time was left of 0 s: accelcheck explain CASE"]
    assert not any((suite.path / "j-explained").iterdir())
