"""Runs a script of an explanation alone, in a fresh process, and says how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.processes import End

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 300.0
"""That a script may take."""


def alone(path: Path, meanings: Mapping[int, str], limit: float = SECONDS) -> str:
    """A sentence about how a script ends.

    Args:
        path: The script; it runs in its own folder.
        meanings: What exit statuses mean.
        limit: Seconds after which it is killed.
    """
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
        )
    except subprocess.TimeoutExpired:
        return f"run alone, it {End(0, limit)}"
    if ended.returncode < 0:
        return f"run alone, it {End(ended.returncode)}"
    last = next(reversed((ended.stdout or ended.stderr).strip().splitlines()), "it printed nothing")
    return f"run alone, it exits with {ended.returncode} ({meanings.get(ended.returncode, 'an error')}): {last}"
