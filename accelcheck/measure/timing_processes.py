"""Stubbed: the timed cases of a run, measured by processes of their own, since a process is what baselines sample. No torch.

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
from typing import TYPE_CHECKING, NamedTuple

from accelcheck.core.case import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

VARIABLE = "ACCELCHECK_TIMING_FILE"
"""Names the file that a round writes to: in its environment, and nowhere else."""
SILENCE = 600.0
"""Seconds after which a round that wrote nothing is taken to hang; it is ended within twice as many."""
_WANTED = "timed-cases.json"

Came = tuple[float, float] | str | None
"""What comes of a case in a round: its ratio and what it waited, or why there is none, or nothing yet: it is about to be timed."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What rounds measured of a case.

    Attributes:
        ratios: Its time to FP32 eager's, one a process.
        reason: Why a process has none, the last one that has none.
        waited: Seconds that its threads waited for a core, as a part of those that it was measured, one a process that has a ratio.
        asked: How many processes were to time it.
        ended: What it did to a process: crash or hang. None where it did neither.
    """

    ratios: tuple[float, ...] = ()
    reason: str = ""
    waited: tuple[float, ...] = ()
    asked: int = 2
    ended: Verdict | None = None

    @property
    def lacking(self) -> str:
        """Why this is no sample; empty where more than half of the processes, and two at least, measured it."""
        if 2 * len(self.ratios) > max(self.asked, 2):
            return ""
        return f"{len(self.ratios)} of {self.asked} processes measured it" + f": {self.reason}" * bool(self.reason)


class TimingError(RuntimeError):
    """The first round came to no case; the message holds the end of what it printed."""


class _End(NamedTuple):
    """How a round ended: its exit status, whether it had been silent for too long, and the last lines that it printed."""

    code: int
    silent: bool
    tail: str

    @property
    def verdict(self) -> Verdict:
        """Of the case in the middle of which it ended."""
        return Verdict.HANG if self.silent else Verdict.CRASH

    @property
    def how(self) -> str:
        return f"was silent for {SILENCE:g} s and was ended" if self.silent else f"ended with {self.code}"


def measure(
    arguments: Sequence[str], cases: Iterable[str], count: int, folder: Path, start: Path, say: Callable[[str], None]
) -> dict[str, Timed]:
    """Time cases in processes of their own. What ends one of them, or makes it hang, is left out from then on.

    Args:
        arguments: Of the pytest run.
        cases: Ids of those to time.
        count: How many rounds.
        folder: Where their files go.
        start: Folder that the run was started in.
        say: Told what is going on, a line each.

    Raises:
        TimingError: The first round came to no case at all: there is a fault in the command, not in a case.
    """
    left = dict.fromkeys(sorted(cases))
    timed = dict.fromkeys(left, Timed(asked=count))
    for number in range(1, count + 1):
        due = list(left)
        while due:  # a second time and more only where a case has ended the process that was to time others after it
            say(f"timing {len(due)} cases in a process of its own, {number} of {count}")
            end, found = _run_process(arguments, due, folder / f"process-{number}-{len(due)}.jsonl", start)
            if not found and end.code:  # 0: a mark skips them all
                what = f"a process that was to time {len(due)} cases {end.how} before the first of them"
                if len(due) == len(timed) and number == 1:
                    raise TimingError(f"{what}:\n{end.tail}")
                say(f"{what}: the others count")
            for case, came in found.items():
                was = timed[case]
                if isinstance(came, tuple):
                    ratio, waited = came
                    timed[case] = replace(was, ratios=(*was.ratios, ratio), waited=(*was.waited, waited))
                elif came is None:
                    say(f"{case}: the process that timed it {end.how}; it is left out from now on")
                    timed[case] = replace(was, reason=f"a process that timed it {end.how}", ended=end.verdict)
                    del left[case]
                else:
                    timed[case] = replace(was, reason=came)
            due = [case for case in due if case not in found] if None in found.values() else []
    return timed


def _run_process(arguments: Sequence[str], cases: list[str], path: Path, start: Path) -> tuple[_End, dict[str, Came]]:
    """Run one process that times cases and writes to this file: how it ended, and what came of those that it came to."""
    (path.parent / _WANTED).write_text(json.dumps(cases), encoding="ascii")
    command = [
        *(sys.executable, "-m", "pytest", *arguments),
        # The last one counts: what the run itself writes stays its own.
        *("--accel-baseline=off", f"--accel-journal={path}.journal"),
    ]
    return _ended(command, path, start), read(path)


def _ended(command: Sequence[str], path: Path, start: Path) -> _End:
    """Run a round to its end."""
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
    return _End(code, silent.is_set(), tail)


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
