"""Explains the first failure of each cause at the end of a run: see `accelcheck explain`. No torch."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
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
WRONG = frozenset({Verdict.FAIL, Verdict.CRASH})
"""Verdicts that are explained. A hang takes as long again, several times."""


def explain(
    journal: Path, words: Sequence[str], seconds: float, since: float, say: Callable[[str], None]
) -> Iterator[str]:
    """Explain the first failure of each cause, in processes of their own; a line for each.

    Args:
        journal: Of the run, whole. Texts and scripts are written to a folder beside it.
        words: Further arguments of ``accelcheck explain``.
        seconds: That all of them may take together.
        since: Time of the clock when the run began: later texts in the folder are its own.
        say: Takes a line before each of them.
    """
    found = [cause for cause in causes(load([journal])) if cause.example.verdict in WRONG]
    if not found:
        return
    folder = folder_of(journal)
    folder.mkdir(exist_ok=True)
    end, late = time.monotonic() + seconds, 0
    for cause in found:
        texts = [text_of(folder, record.case.id) for _, record in cause.cases]
        if done := next((path for path in texts if _later(path, since)), None):  # a test has explained it
            yield f"{cause.title}: {done}"
            continue
        left = end - time.monotonic()
        if left <= 0:
            late += 1
            continue
        case = cause.example.case.id
        say(f"explaining {case}")
        path = text_of(folder, case)
        command = [
            sys.executable,
            "-m",
            "accelcheck.cli",
            "explain",
            case,
            f"--script={path.with_suffix('.py')}",
            *words,
        ]
        try:
            ended = subprocess.run(  # noqa: S603 - our own command, by this interpreter
                command, capture_output=True, text=True, errors="replace", check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            late += 1
            continue
        if ended.returncode == pytest.ExitCode.USAGE_ERROR:
            said = next(reversed(ended.stderr.strip().splitlines()), "")
            yield f"{cause.title}: not explained: {said}"  # such as a case of a test, which alone has its model
            continue
        if not ended.stdout:
            yield f"{cause.title}: not explained: accelcheck explain ended with {ended.returncode}: {ended.stderr[-300:].strip()}"
            continue
        path.write_text(ended.stdout, encoding="utf-8")
        yield f"{cause.title}: {path}"
    if late:
        yield f"{late} of {len(found)} causes: no time was left of {seconds:.0f} s: accelcheck explain CASE"


def _later(path: Path, since: float) -> bool:
    with suppress(OSError):
        return path.stat().st_mtime >= since
    return False
