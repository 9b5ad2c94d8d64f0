"""Explains the first failure of each cause at the end of a run, by `accelcheck explain`. No torch."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from accelcheck.core.case import Verdict
from accelcheck.report.causes import causes
from accelcheck.report.explained import folder_of, text_of
from accelcheck.report.run import load

LEAST = 30.0
"""Least time limit of all explanations of a run together, in seconds."""
WRONG = frozenset({Verdict.FAIL, Verdict.CRASH})
"""Verdicts that are explained. To explain a hang would take its time again, several times."""


def explain(
    journal: Path, words: Sequence[str], seconds: float, since: float, say: Callable[[str], None]
) -> Iterator[str]:
    """Explains the first failure of each cause in a child process; yields a line for each.

    Args:
        journal: Whole journal of the run. Texts and scripts are written to a folder beside it.
        words: Further arguments of ``accelcheck explain``.
        seconds: Time limit of all explanations together, in seconds.
        since: Time of the clock when the run began: later texts in the folder are its own.
        say: Function that prints a line before each explanation.
    """
    failures = [cause for cause in causes(load([journal])) if cause.example.verdict in WRONG]
    if not failures:
        return
    folder = folder_of(journal)
    folder.mkdir(exist_ok=True)
    end, late = time.monotonic() + seconds, 0
    for cause in failures:
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
        script = f"--script={path.with_suffix('.py')}"
        command = [sys.executable, "-m", "accelcheck.cli", "explain", case, script, *words]
        try:
            ended = subprocess.run(  # noqa: S603 - our own command, by this interpreter
                command, capture_output=True, text=True, errors="replace", check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            late += 1
            continue
        if ended.returncode == pytest.ExitCode.USAGE_ERROR:
            last = next(reversed(ended.stderr.strip().splitlines()), "")
            yield f"{cause.title}: not explained: {last}"  # such as a case of a test, which alone has its model
            continue
        if not ended.stdout:
            why = f"accelcheck explain ended with {ended.returncode}: {ended.stderr[-300:].strip()}"
            yield f"{cause.title}: not explained: {why}"
            continue
        path.write_text(ended.stdout, encoding="utf-8")
        yield f"{cause.title}: {path}"
    if late:
        yield f"{late} of {len(failures)} causes: no time was left of {seconds:.0f} s: accelcheck explain CASE"


def _later(path: Path, since: float) -> bool:
    with suppress(OSError):
        return path.stat().st_mtime >= since
    return False
