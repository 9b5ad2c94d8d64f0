"""Timing of a run's cases in separate processes, since a baseline is a sample of processes. No torch.

A timing process runs the caller's pytest command again, so that it finds the same plugins, hooks and cases. Each timed
case measures its ratio to FP32 eager there, reports it to the run, and is skipped: nothing is judged.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accelcheck.core import processes
from accelcheck.core.processes import Child, End, Message

VARIABLE = "ACCELCHECK_TIMING_FILE"
"""Environment variable of timing processes: the file with the ids of the cases to time."""
SILENCE = 600.0
"""Silence in seconds after which a timing process counts as hanging; it is ended within twice as many."""
LINES = 20
"""Number of last lines of output that an error quotes."""

CaseReport = tuple[float, float] | str | None
"""Report of a timing process on a case: ratio and waited part, or the reason for no ratio, or None: it has begun."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Measurements of a case by the timing processes of a run.

    Attributes:
        ratios: Time divided by FP32 eager's, one per process.
        reason: Reason of the last process without a ratio; empty if there is none.
        waited: Share of the measured seconds in which its threads waited for a core, one per ratio.
        asked: Number of processes that were to time it.
        ended: End of a process that the case made crash or hang; None if there is none.
    """

    ratios: tuple[float, ...] = ()
    reason: str = ""
    waited: tuple[float, ...] = ()
    asked: int = 2
    ended: End | None = None

    @property
    def lacking(self) -> str:
        """The reason why this is no sample; empty if more than half of the processes, and at least two, measured it."""
        if 2 * len(self.ratios) > max(self.asked, 2):
            return ""
        return f"{len(self.ratios)} of {self.asked} processes measured it" + f": {self.reason}" * bool(self.reason)


class TimingError(RuntimeError):
    """The first timing process ended before its first case; the message quotes its last output."""


def measure(
    arguments: Sequence[str], cases: Iterable[str], count: int, folder: Path, start: Path, say: Callable[[str], None]
) -> dict[str, Timed]:
    """Time cases in separate processes. A case that makes one of them crash or hang is left out from then on.

    `arguments` are those of the pytest run, which was started in the folder `start`; files of the `count` processes go
    to `folder`. `say` is called with each line of progress. A `TimingError` where the first process ended before its
    first case: the fault is in the command, not in a case.
    """
    left = dict.fromkeys(sorted(cases))
    timed = dict.fromkeys(left, Timed(asked=count))
    for number in range(1, count + 1):
        due = list(left)
        while due:  # more than once only where a case has ended the process before the other cases were timed
            say(f"timing {len(due)} cases in a process of its own, {number} of {count}")
            end, last, reports = _run_process(arguments, due, folder / f"process-{number}-{len(due)}.json", start)
            if not reports and end.code:  # 0: a mark skips them all
                what = f"a process that was to time {len(due)} cases {end} before the first of them"
                if len(due) == len(timed) and number == 1:
                    raise TimingError(f"{what}:\n{last}")
                say(f"{what}: the others count")
            for case, came in reports.items():
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
            due = [case for case in due if case not in reports] if None in reports.values() else []
    return timed


def _run_process(
    arguments: Sequence[str], cases: list[str], path: Path, start: Path
) -> tuple[End, str, dict[str, CaseReport]]:
    """Run a timing process; returns its end, its last output, and its report on each case."""
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
    """Report the outcome of a case to the run."""
    if isinstance(came, str):
        processes.say(case=case, reason=came)
    elif came is None:
        processes.say(case=case)
    else:
        processes.say(case=case, ratio=came[0], waited=came[1])


def read(messages: Iterable[Message]) -> dict[str, CaseReport]:
    """The last report of a timing process on each case."""
    reports: dict[str, CaseReport] = {}
    for message in messages:
        case, ratio, waited = message.get("case"), message.get("ratio"), message.get("waited", 0.0)
        if not isinstance(case, str) or not isinstance(waited, float):
            continue
        if "reason" in message:
            reports[case] = str(message["reason"])
        elif ratio is None:
            reports[case] = None
        elif isinstance(ratio, float) and 0.0 < ratio < math.inf:
            reports[case] = ratio, waited
        else:
            reports[case] = f"expected a positive ratio, got {ratio}"
    return reports
