"""The parts of the slow tests: each slow test is in exactly one."""

from __future__ import annotations

import sys

import pytest
from process_harness import completed

FILE = "tests/plugin/test_plugin_explain.py"


def collected(*words: str, file: str = FILE) -> tuple[int, list[str], str]:
    """Exit status, ids and errors of pytest that collects a file."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", file, *words]
    ended = completed(command)
    return ended.returncode, [line for line in ended.stdout.splitlines() if "::" in line], ended.stderr


@pytest.mark.slow
def test_the_parts_of_the_slow_tests_add_up() -> None:
    everything, none = set(collected("--all")[1]), set(collected()[1])
    first, second = (set(collected(f"--slow-part={part}/2")[1]) for part in (1, 2))
    assert first | second == everything
    assert first & second == none
    assert none < first < everything


@pytest.mark.slow
def test_the_first_parameters_of_a_slow_test_run_with_the_fast_ones() -> None:
    name = "tests/docs/test_quantizer_page.py::test_each_step_says_what_the_page_quotes["
    some, all_of_them = (
        [own for own in collected(*words, file=name.partition("::")[0])[1] if own.startswith(name)]
        for words in ((), ("--all",))
    )
    assert some == sorted(all_of_them)[:1]
    assert len(all_of_them) > 1


def test_a_part_that_is_none_is_refused() -> None:
    code, _, errors = collected("--slow-part=3/2")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "expected I/N with 1 <= I <= N <= 999999, such as 1/4, got '3/2'" in errors
