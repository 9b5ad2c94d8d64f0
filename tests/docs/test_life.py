"""The page about a case's life in CONTRIBUTING.md is what a trace of a case shows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from case_trace import CASE, DURING, IMPORTS, traced  # noqa: E402 - from a folder of scripts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from case_trace import Call


pytestmark = pytest.mark.slow  # profiled, a run takes a minute on a busy machine


def section() -> str:
    """The section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## A case's life\n")[2].partition("\n## ")[0]


def steps() -> list[tuple[str, str]]:
    """Process and function of each row of the table."""
    rows = [line.split("|")[1:3] for line in section().splitlines() if line.startswith("|")]
    return [(process.strip(), function.strip().strip("`")) for process, function in rows[2:]]


@pytest.fixture(scope="module")
def calls() -> Sequence[Call]:
    return [call for call in traced(CASE) if call.part != IMPORTS]


def test_functions_are_called_in_the_processes_and_the_order_of_the_page(calls: Sequence[Call]) -> None:
    assert len(steps()) > 20
    for process in dict.fromkeys(process for process, _ in steps()):
        called = [f"{call.file}:{call.function}" for call in calls if call.process == process]
        named = [function for own, function in steps() if own == process]
        assert [function for function in called if function in named] == named, process


def test_the_page_names_each_file_that_runs_or_its_folder(calls: Sequence[Call]) -> None:
    named = {word.partition(":")[0] for word in section().split("`")[1::2]}
    own = {"devices/__init__.py", "devices/cpu.py", "techniques/eager.py", "workloads/mlp.py"}  # of this case
    files = {call.file for call in calls if call.part == DURING} - own
    assert not {file for file in files if file not in named and f"{file.partition('/')[0]}/" not in named}
