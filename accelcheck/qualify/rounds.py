"""Rounds: the timed cases of a run, measured by processes of their own, since a process is what baselines sample. No torch.

A round is the caller's own pytest command again, so that it finds the same plugins, hooks and cases. In it each timed case
measures its ratio to FP32 eager, appends it to a file, and is skipped: nothing is judged, so nothing passes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

VARIABLE = "ACCELCHECK_ROUND"
"""Names the file that a round writes to: in its environment, and nowhere else."""
_WANTED = "round-cases.json"


class RoundError(RuntimeError):
    """A round measured nothing; the message holds the end of what it printed."""


def measure(
    arguments: Sequence[str], cases: Iterable[str], count: int, folder: Path, start: Path, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Time of each case to FP32 eager's, one number a round that measured it.

    Args:
        arguments: Of the pytest run.
        cases: Ids of those to time.
        count: How many rounds.
        folder: Where their files go.
        start: Folder that the run was started in.
        say: Told what is going on, a line each.

    Raises:
        RoundError: A round left no figures at all.
    """
    ratios: dict[str, list[float]] = {}
    (folder / _WANTED).write_text(json.dumps(sorted(cases)), encoding="ascii")
    for number in range(1, count + 1):
        say(f"timing in a process of its own, {number} of {count}")
        path = folder / f"round-{number}.jsonl"
        ended = subprocess.run(  # noqa: S603 - the command that this process was started with
            [
                *(sys.executable, "-m", "pytest", *arguments),
                # The last one counts: what the run itself writes stays its own.
                *("--accel-baseline=off", f"--accel-journal={path}.journal"),
            ],
            cwd=start,
            # It sees this process's import path, whatever put accelcheck and a vendor's plugin on it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: str(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        found = read(path)
        if not found:
            tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
            raise RoundError(
                f"a process that was to measure timed cases ended with {ended.returncode} and none:\n{tail}"
            )
        for case, ratio in found.items():
            ratios.setdefault(case, []).append(ratio)
    return ratios


def ongoing() -> str | None:
    """The file that this process is to append to, if it is a round."""
    return os.environ.get(VARIABLE)


def wanted(path: str) -> frozenset[str]:
    """Ids of the cases that a round, which writes to this file, is to time."""
    return frozenset(json.loads((Path(path).parent / _WANTED).read_text(encoding="ascii")))


def append(path: str, case: str, ratio: float) -> None:
    """Add a case's ratio."""
    with open(path, "a", encoding="ascii") as file:  # noqa: PTH123 - a path from the environment
        file.write(json.dumps({"case": case, "ratio": ratio}) + "\n")


def read(path: Path) -> dict[str, float]:
    """The ratios that a round wrote; nothing of what is not a whole line, and nothing where there is no file."""
    found: dict[str, float] = {}
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    for line in lines:
        try:
            data = json.loads(line)
            ratio = float(data["ratio"])
            if 0.0 < ratio < math.inf:
                found[str(data["case"])] = ratio
        except (ValueError, TypeError, KeyError):
            continue  # cut short: the process was ended while it wrote
    return found
