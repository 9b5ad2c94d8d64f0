"""Times the cases of a run in processes of their own, because a baseline is a sample of processes. No torch.

A timing process is the caller's own pytest command again, so that it finds the same plugins, hooks and cases. In it each timed
case measures its ratio to FP32 eager, reports it to the run, and is skipped: nothing is judged there.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core import processes
from accelcheck.core.processes import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accelcheck.core.processes import End, Message

VARIABLE = "ACCELCHECK_TIMING_FILE"
"""In the environment of a timing process alone: the file with the ids of the cases that it is to time."""
SILENCE = 600.0
"""Seconds after which a timing process that reported nothing counts as hanging; it is ended within twice as many."""
LINES = 20
"""Last lines of its output that an error quotes."""

CaseReport = tuple[float, float] | str | None
"""What a timing process reports of a case: ratio and waited part, or why there is no ratio, or None: the case has begun."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What the timing processes of a run measured of a case.

    Attributes:
        ratios: Its time divided by FP32 eager's, one a process.
        reason: Why a process has no ratio; of several, the last one's reason.
        waited: The part of the measured seconds in which its threads waited for a core, one for each ratio.
        asked: How many processes were to time it.
        ended: How a process ended that it made crash or hang; None where it did neither.
    """

    ratios: tuple[float, ...] = ()
    reason: str = ""
    waited: tuple[float, ...] = ()
    asked: int = 2
    ended: End | None = None

    @property
    def lacking(self) -> str:
        """Why this is no sample; empty where more than half of the processes, and two at least, measured it."""
        if 2 * len(self.ratios) > max(self.asked, 2):
            return ""
        return f"{len(self.ratios)} of {self.asked} processes measured it" + f": {self.reason}" * bool(self.reason)


class TimingError(RuntimeError):
    """The first timing process ended before its first case; the message quotes its last output."""


def measure(
    arguments: Sequence[str], cases: Iterable[str], count: int, folder: Path, start: Path, say: Callable[[str], None]
) -> dict[str, Timed]:
    """Time cases in processes of their own. A case that makes one of them crash or hang is left out from then on.

    Args:
        arguments: Of the pytest run.
        cases: Ids of those to time.
        count: How many timing processes.
        folder: For their files.
        start: Folder that the run was started in.
        say: Called with each line of progress.

    Raises:
        TimingError: The first process ended before its first case: the fault is in the command, not in a case.
    """
    left = dict.fromkeys(sorted(cases))
    timed = dict.fromkeys(left, Timed(asked=count))
    for number in range(1, count + 1):
        due = list(left)
        while due:  # more than once only where a case has ended the process before the other cases were timed
            say(f"timing {len(due)} cases in a process of its own, {number} of {count}")
            end, last, found = _run_process(arguments, due, folder / f"process-{number}-{len(due)}.json", start)
            if not found and end.code:  # 0: a mark skips them all
                what = f"a process that was to time {len(due)} cases {end} before the first of them"
                if len(due) == len(timed) and number == 1:
                    raise TimingError(f"{what}:\n{last}")
                say(f"{what}: the others count")
            for case, came in found.items():
                was = timed[case]
                if isinstance(came, tuple):
                    ratio, waited = came
                    timed[case] = replace(was, ratios=(*was.ratios, ratio), waited=(*was.waited, waited))
                elif came is None:
                    say(f"{case}: the process that timed it {end}; it is left out from now on")
                    timed[case] = replace(was, reason=f"a process that timed it {end}", ended=end)
                    del left[case]
                else:
                    timed[case] = replace(was, reason=came)
            due = [case for case in due if case not in found] if None in found.values() else []
    return timed


def _run_process(
    arguments: Sequence[str], cases: list[str], path: Path, start: Path
) -> tuple[End, str, dict[str, CaseReport]]:
    """Run one timing process: how it ended, its last output, and what it reported of each case."""
    path.write_text(json.dumps(cases), encoding="ascii")
    # The last option counts: the run's own baselines and journal stay as they are.
    command = ["-m", "pytest", *arguments, "--accel-resume=", "--accel-baseline=off"]
    command += [f"--accel-journal={path.with_suffix('.journal')}"]
    with Child(command, {VARIABLE: str(path)}, cwd=start) as child:
        end = child.wait(SILENCE, silence=True)
        assert end is not None
        return end, child.last(LINES), read(child.messages())


def ongoing() -> str | None:
    """The file of this process's cases, if it is a timing process."""
    return os.environ.get(VARIABLE)


def wanted(path: str) -> frozenset[str]:
    """Ids of the cases that a timing process is to time, from its file."""
    return frozenset(json.loads(Path(path).read_text(encoding="ascii")))


def report(case: str, came: CaseReport = None) -> None:
    """Tell the run what came of a case."""
    if isinstance(came, str):
        processes.say(case=case, reason=came)
    elif came is None:
        processes.say(case=case)
    else:
        processes.say(case=case, ratio=came[0], waited=came[1])


def read(messages: Iterable[Message]) -> dict[str, CaseReport]:
    """What a timing process reported last of each case."""
    found: dict[str, CaseReport] = {}
    for message in messages:
        case, ratio, waited = message.get("case"), message.get("ratio"), message.get("waited", 0.0)
        if not isinstance(case, str) or not isinstance(waited, float):
            continue
        if "reason" in message:
            found[case] = str(message["reason"])
        elif ratio is None:
            found[case] = None
        elif isinstance(ratio, float) and 0.0 < ratio < math.inf:
            found[case] = ratio, waited
        else:
            found[case] = f"expected a positive ratio, got {ratio}"
    return found
