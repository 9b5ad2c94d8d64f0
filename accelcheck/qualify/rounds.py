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
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

VARIABLE = "ACCELCHECK_ROUND"
"""Names the file that a round writes to: in its environment, and nowhere else."""
SILENCE = 600.0
"""Seconds after which a round that wrote nothing is taken to hang; it is ended within twice as many."""
_WANTED = "round-cases.json"

Came = tuple[float, float] | str | None
"""What comes of a case in a round: its ratio and what it waited, or why there is none, or nothing yet: it is about to be timed."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What rounds measured of a case.

    Attributes:
        ratios: Its time to FP32 eager's, one a process.
        reason: Why a process has none, the last one that has none.
        waited: Seconds that its threads waited for a core, as a part of those that it was measured, one a process that has a ratio.
    """

    ratios: tuple[float, ...] = ()
    reason: str = ""
    waited: tuple[float, ...] = ()


class RoundError(RuntimeError):
    """A round came to no case; the message holds the end of what it printed."""


def measure(
    arguments: Sequence[str], cases: Iterable[str], count: int, folder: Path, start: Path, say: Callable[[str], None]
) -> dict[str, Timed]:
    """Time cases in processes of their own. What ends one of them, or makes it hang, is left to the next ones no more.

    Args:
        arguments: Of the pytest run.
        cases: Ids of those to time.
        count: How many rounds.
        folder: Where their files go.
        start: Folder that the run was started in.
        say: Told what is going on, a line each.

    Raises:
        RoundError: A round came to no case at all.
    """
    left = dict.fromkeys(sorted(cases))
    timed = dict.fromkeys(left, Timed())
    for number in range(1, count + 1):
        say(f"timing {len(left)} cases in a process of its own, {number} of {count}")
        path = folder / f"round-{number}.jsonl"
        (folder / _WANTED).write_text(json.dumps(list(left)), encoding="ascii")
        command = [
            *(sys.executable, "-m", "pytest", *arguments),
            # The last one counts: what the run itself writes stays its own.
            *("--accel-baseline=off", f"--accel-journal={path}.journal"),
        ]
        how, tail = _ended(command, path, start)
        found = read(path)
        if not found:
            raise RoundError(f"a process that was to time {len(left)} cases {how} before the first of them:\n{tail}")
        for case, came in found.items():
            was = timed[case]
            if isinstance(came, tuple):
                ratio, waited = came
                timed[case] = replace(was, ratios=(*was.ratios, ratio), waited=(*was.waited, waited))
            elif came is None:
                say(f"{case}: the process that timed it {how}; it is left out from now on")
                timed[case] = replace(was, reason=f"a process that timed it {how}")
                del left[case]
            else:
                timed[case] = replace(was, reason=came)
        if not left:
            break
    return timed


def _ended(command: Sequence[str], path: Path, start: Path) -> tuple[str, str]:
    """Run a round to its end: how it ended, and the last lines that it printed."""
    silent = threading.Event()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - the command that this process was started with
            command,
            cwd=start,
            # It sees this process's import path, whatever put accelcheck and a vendor's plugin on it.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: str(path)},
            stdout=output,  # not a pipe, which a compiler's worker that stays would hold open
            stderr=subprocess.STDOUT,
        )
        over = threading.Event()

        def watch() -> None:
            written = 0
            while not over.wait(SILENCE):
                now = path.stat().st_size if path.exists() else 0
                if now == written:
                    silent.set()
                    process.kill()
                written = now

        # A thread, since to wait with a time limit is to ask every now and then: on the cores that are timed.
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            code = process.wait()
        finally:
            over.set()
            process.kill()
            process.wait()
        output.seek(0)
        tail = "\n".join(output.read().splitlines()[-20:])
    how = f"was silent for {SILENCE:g} s and was ended" if silent.is_set() else f"ended with {code}"
    return how, tail


def ongoing() -> str | None:
    """The file that this process is to append to, if it is a round."""
    return os.environ.get(VARIABLE)


def wanted(path: str) -> frozenset[str]:
    """Ids of the cases that a round, which writes to this file, is to time."""
    return frozenset(json.loads((Path(path).parent / _WANTED).read_text(encoding="ascii")))


def append(path: str, case: str, came: Came = None) -> None:
    """Add what came of a case."""
    line: dict[str, object] = {"case": case}
    if isinstance(came, str):
        line["reason"] = came
    elif came is not None:
        line["ratio"], line["waited"] = came
    with open(path, "a", encoding="ascii") as file:  # noqa: PTH123 - a path from the environment
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> dict[str, Came]:
    """What a round wrote last of each case that it came to; no more than whole lines."""
    found: dict[str, Came] = {}
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    for line in lines:
        try:
            data = json.loads(line)
            case, ratio, waited = str(data["case"]), data.get("ratio"), float(data.get("waited", 0.0))
        except (ValueError, TypeError, KeyError):
            continue  # cut short: the process was ended while it wrote
        if "reason" in data:
            found[case] = str(data["reason"])
        elif ratio is None:
            found[case] = None
        elif isinstance(ratio, float) and 0.0 < ratio < math.inf:
            found[case] = ratio, waited
        else:
            found[case] = f"expected a positive ratio, got {ratio}"
    return found
