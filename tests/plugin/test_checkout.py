"""pytest in a checkout of accelcheck: with an option that selects cases it runs the suite, without one the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from process_harness import completed

from accelcheck.core.journal_reading import read
from accelcheck.core.selection import Selection
from accelcheck.techniques.matrix import Matrix

CHECKOUT = Path(__file__).parents[2]
SUITE = "accelcheck/suite/"


def collected(*words: str) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ACCELCHECK_"))}
    done = completed(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words],
        cwd=CHECKOUT,
        env=environ | {"PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--accel-device=xla"], marks=pytest.mark.slow),
        ["--accel-device=cpu", "-k", "[eager/"],
        pytest.param(["--accel-technique=eager"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_selection_of_cases_collects_the_suite_and_nothing_else(words: list[str]) -> None:
    result = collected(*words)
    assert result
    assert {line for line in result if not line.startswith(SUITE)} == set()
    if "eager" in words[-1]:
        assert all("[eager/" in line or "[no-case]" in line for line in result)


@pytest.mark.slow
def test_a_path_is_what_is_run_whatever_is_selected() -> None:
    assert {line.partition("::")[0] for line in collected("tests/verify/test_rounding.py", "--accel-device=cpu")} == {
        "tests/verify/test_rounding.py"
    }


@pytest.mark.slow
def test_without_a_selection_the_tests_are_run() -> None:
    result = collected("--ignore-glob=tests/*/*")  # the tests of the package's folders take seconds to collect
    assert result
    assert not [line for line in result if not line.startswith("tests/test_")]


@pytest.mark.slow
def test_workers_run_the_suite_too(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    done = completed(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", f"--accel-journal={journal}"),
            *("--accel-device=cpu", "--accel-technique=eager", "--accel-workload=mlp"),
        ],
        cwd=CHECKOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("accelcheck: level 1: ")]
    assert "not looked at:" in lines
    selection = Selection(("cpu",), ("eager",), ("mlp",))
    judged = {case.id for case in Matrix.load().cases(selection) if not case.timed}
    _, records = read(journal)
    assert {record.case.id for record in records} == judged
