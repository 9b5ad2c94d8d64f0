"""Processes in the background of a shell, where interrupts and hang-ups are ignored, on busy cores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_harness import started

ROOT = Path(__file__).parents[1]
FILES = (
    "tests/benchmarks/test_gpu_steps.py", "tests/commands/test_run_command.py", "tests/core/test_clean_process.py",
    "tests/core/test_processes.py", "tests/explain/test_explain.py", "tests/plugin/test_survival.py",
)  # fmt: skip
CHOSEN = "signal or interrupted or killed or ended or ends or crash or hangs or left"
BACKGROUND = """trap '' HUP INT; exec "$@" """
"""Signals that `nohup` and `&` ignore in a program that a script starts."""


@pytest.mark.slow
def test_processes_are_ended_and_named_in_the_background_and_beside_load() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *FILES]
    with contextlib.ExitStack() as busy:
        for _ in range(2):
            busy.enter_context(started([sys.executable, "-c", "while True: pass"]))
        with started(
            ["/bin/sh", "-c", BACKGROUND, "sh", *words],
            cwd=ROOT,
            env=environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as tests:
            output, _ = tests.communicate()
    assert tests.returncode == 0, output[-5000:]
