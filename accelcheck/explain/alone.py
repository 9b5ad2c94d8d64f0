"""Runs a script of an explanation alone, in a fresh process, and says how it ended."""

import functools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from accelcheck.core.processes import End, end_with_parent

SECONDS = 300.0
"""Time limit of a script."""


def alone(path: Path, meanings: Mapping[int, str], limit: float | None = SECONDS) -> str:
    """Run a script in a fresh process, in its own folder; a sentence about how it ends, with what its status means."""
    folders = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    try:
        ended = subprocess.run(  # noqa: S603 - a script that was just written here, by this interpreter
            [sys.executable, path.name],
            env={**os.environ, "PYTHONPATH": folders},
            cwd=path.parent,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=limit,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired:
        return f"run alone, it {End(0, limit or 0.0)}"
    if ended.returncode < 0:
        return f"run alone, it {End(ended.returncode)}"
    printed = ended.stdout.strip()
    last = next(reversed((printed or ended.stderr.strip()).splitlines()), "it printed nothing")
    meaning = meanings.get(ended.returncode, "an error") if printed else "an error"  # an exception exits with 1 too
    return f"run alone, it exits with {ended.returncode} ({meaning}): {last}"
