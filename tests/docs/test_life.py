"""The page about a case's life in CONTRIBUTING.md is what a trace of a case shows."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from case_trace import CASE, CASES, DURING, IMPORTS, PYTEST, REFERENCES, traced

if TYPE_CHECKING:
    from case_trace import Call


ROOT = Path(__file__).parent.parent.parent


def section() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## A case's life\n")[2].partition("\n## ")[0]


def rows() -> list[list[str]]:
    """The cells of each row of the table: step, process, function, what it takes and gives."""
    lines = [line for line in section().splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def calls() -> Sequence[Call]:
    return [call for call in traced(CASE) if call.part != IMPORTS]


def test_each_function_of_the_page_exists() -> None:
    assert rows()
    for _, _, function, *_ in rows():
        path, _, name = function.partition(":")
        body: list[ast.stmt] = ast.parse((ROOT / "accelcheck" / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            owners = [node for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            assert owners, function
            body = owners[0].body


@pytest.mark.slow  # profiled, a run takes a minute on a busy machine
def test_functions_are_called_in_the_order_and_the_processes_of_the_page(calls: Sequence[Call]) -> None:
    steps = [(process, function) for _, process, function, *_ in rows()]
    assert [step for step, *_ in rows()] == [str(number) for number in range(1, len(steps) + 1)]
    assert {process for process, _ in steps} == {PYTEST, CASES, REFERENCES}
    in_order = sorted(calls, key=lambda call: call.at)
    called = dict.fromkeys((call.process, f"{call.file}:{call.function}") for call in in_order)
    assert [step for step in called if step in steps] == steps


@pytest.mark.slow
def test_the_page_names_each_file_that_runs_or_its_folder(calls: Sequence[Call]) -> None:
    named = {word.partition(":")[0] for word in section().split("`")[1::2]}
    own = {"devices/__init__.py", "devices/cpu.py", "techniques/eager.py", "workloads/mlp.py"}  # of this case
    files = {call.file for call in calls if call.part == DURING} - own
    assert not {file for file in files if file not in named and f"{file.partition('/')[0]}/" not in named}
