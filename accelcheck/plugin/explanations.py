"""Explains the first failure of each cause at the end of a run: see `accelcheck explain`."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Verdict
from accelcheck.report.causes import causes
from accelcheck.report.explained import folder_of, text_of
from accelcheck.report.run import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

LEAST = 30.0
"""Seconds that all explanations of a run may take, however short it was."""


def explain(journal: Path, imports: Sequence[str], seconds: float, say: Callable[[str], None]) -> Iterator[str]:
    """Explain the first `fail` of each cause, in processes of their own; a line for each.

    Args:
        journal: Of the run, whole. Texts and scripts are written to a folder beside it.
        imports: Modules that each process imports.
        seconds: That all of them may take together.
        say: Takes a line before each of them.
    """
    found = [cause for cause in causes(load([journal])) if cause.example.verdict is Verdict.FAIL]
    if not found:
        return
    folder = folder_of(journal)
    folder.mkdir(exist_ok=True)
    end, late = time.monotonic() + seconds, 0
    for cause in found:
        left = end - time.monotonic()
        if left <= 0:
            late += 1
            continue
        case = cause.example.case.id
        say(f"explaining {case}")
        path = text_of(folder, case)
        words = ["explain", case, f"--script={path.with_suffix('.py')}", *(f"--import={name}" for name in imports)]
        try:
            ended = subprocess.run(  # noqa: S603 - our own command, by this interpreter
                [sys.executable, "-m", "accelcheck.cli", *words],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            late += 1
            continue
        if ended.returncode == pytest.ExitCode.USAGE_ERROR:
            continue  # a case of somebody's own model
        path.write_text(ended.stdout or ended.stderr, encoding="utf-8")
        yield f"{cause.title}: {path}"
    if late:
        yield f"{late} of {len(found)} causes: no time was left of {seconds:.0f} s: accelcheck explain CASE"
