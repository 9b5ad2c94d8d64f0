"""``--accel-explain``: explains the first failure of each cause at the end of a run, in the report too."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from plugin_harness import Suite
from test_own_fixture import WRONG

from accelcheck import cli
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.plugin import explanations
from accelcheck.report.causes import Cause
from accelcheck.report.explained import Explained, explained, folder_of, text_of
from accelcheck.report.signatures import Kind

CASE = "wrong/mlp/cpu/float32/forward"
PATIENT = """
from accelcheck.plugin import explanations
explanations.LEAST = 600.0  # a busy machine takes longer than a user waits
"""
WORDS = ("--accel-device=cpu", "--accel-technique=wrong", "--accel-workload=mlp")


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    made = Suite(pytester, monkeypatch)
    pytester.makeconftest(WRONG + PATIENT)
    return made


def run(suite: Suite, *words: str) -> pytest.RunResult:
    command = [sys.executable, "-m", "pytest", "--pyargs", "accelcheck.suite", "-q", "-p", "no:cacheprovider"]
    return suite.pytester.run(*command, *WORDS, *words)


@pytest.mark.slow
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


@pytest.mark.slow
def test_it_needs_a_journal_to_write_beside(suite: Suite) -> None:
    result = run(suite, "--accel-explain")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--accel-explain writes beside the journal of the run: give --accel-journal=FILE too"]
    )


@pytest.mark.slow
def test_what_there_is_no_time_for_is_counted(suite: Suite) -> None:
    run(suite, "--accel-journal=j.jsonl")
    begun: list[str] = []
    answer = list(explanations.explain(suite.path / "j.jsonl", (), 0.0, 0.0, begun.append))
    assert not begun
    assert answer == ["1 of 1 causes: no time was left of 0 s: accelcheck explain CASE"]
    assert not any((suite.path / "j-explained").iterdir())


OWN = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def make():
    return net(), (torch.ones(5, 4),)

def test_wrong(accel):
    class Local(nn.Module):  # what explains it must have this very class
        def __init__(self):
            super().__init__()
            self.net = net()
            self.scale = lambda x: x.sin()

        def forward(self, x):
            return self.scale(self.net(x))

    accel.check(Local(), (torch.ones(5, 4),), techniques=["eager", "wrong"])

def test_wrong_again(accel):
    accel.check(net(), (torch.ones(5, 4),), techniques=["wrong"])
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_failure_of_a_test_with_the_fixture_is_explained_while_its_model_is_there(suite: Suite, workers: str) -> None:
    suite.pytester.makepyfile(test_own=OWN)
    result = suite.pytester.runpytest_subprocess(
        "-q", "-k", "not again", "--accel-explain", "--accel-journal=j.jsonl", "-n", workers, "-p", "no:cacheprovider"
    )
    result.assert_outcomes(failed=1)
    # Forward and backward are one cause.
    (text,) = (suite.path / "j-explained").glob("*.txt")
    result.stdout.fnmatch_lines([f"explained: {text}", "explained:", f"*{text}"])
    assert "=> technique" in text.read_text(encoding="utf-8")
    assert "aten::mul" in text.read_text(encoding="utf-8")
    assert cli.main(["report", str(suite.path / "j.jsonl"), "-o", str(suite.path / "r.html")]) == 0
    page = (suite.path / "r.html").read_text(encoding="utf-8")
    assert f"Why {text.stem.split('-')[0]}" in page
    assert "=&gt; technique" in page


@pytest.mark.slow
def test_a_cause_is_explained_once_in_tests_with_the_fixture(suite: Suite) -> None:
    suite.pytester.makepyfile(test_own=OWN)
    result = suite.pytester.runpytest_subprocess("-q", "--accel-explain", "--accel-journal=j.jsonl")
    result.assert_outcomes(failed=2)
    assert len([*(suite.path / "j-explained").glob("*.txt")]) == 1


@pytest.mark.slow
def test_a_model_of_the_command_line_is_explained_at_the_end(suite: Suite) -> None:
    suite.pytester.makepyfile(model=OWN.partition("def test_")[0])
    words = ["--accel-model=model.py:make", "--accel-workload=model", "--accel-explain", "--accel-journal=j.jsonl"]
    result = run(suite, *words)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    texts = [*(suite.path / "j-explained").glob("*model*.txt")]
    assert texts
    assert all("=> technique" in text.read_text(encoding="utf-8") for text in texts)


@pytest.mark.slow
def test_a_crash_is_explained_too(suite: Suite) -> None:
    suite.pytester.makeconftest(WRONG.replace("module = program.module", "import os; os.abort()"))
    run(suite, "--accel-explain", "--accel-journal=j.jsonl")
    (text,) = (suite.path / "j-explained").glob("*.txt")
    assert "none had begun" in text.read_text(encoding="utf-8")


def test_the_text_of_any_case_of_a_cause_is_found(tmp_path: Path) -> None:
    first, second = (Record(Case("wrong", name, "cpu", "float32", Mode.FORWARD, 1), Verdict.FAIL) for name in "ab")
    cause = Cause("wrong values", Kind.VALUES, (("cpu", first), ("cpu", second)), first)
    run = SimpleNamespace(sources=[str(tmp_path / "j.jsonl")])
    assert not explained([run], [cause])  # type: ignore[list-item]  # its sources are all that counts
    folder = folder_of(tmp_path / "j.jsonl")
    folder.mkdir()
    text_of(folder, second.case.id).write_text("why")
    explanation = explained([run], [cause])  # type: ignore[list-item]  # as above
    assert explanation == {first.case.id: Explained(second.case.id, "why")}
    text_of(folder, first.case.id).write_text("its own")
    assert explained([run], [cause])[first.case.id].text == "its own"  # type: ignore[list-item]  # as above
