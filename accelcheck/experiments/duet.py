"""Compares the speed of two environments on this machine, case by case, in pairs of processes that run in turns.

The parent never imports torch, since the environments may have other versions of torch and accelcheck. After a case
that crashes or hangs, the others continue in new processes.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.experiments.duet_process import PROTOCOL
from accelcheck.experiments.duet_side import AbsentError, DuetSide, Process, SideError, apart, together
from accelcheck.measure import duet
from accelcheck.measure.paired import SpeedVerdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelcheck.core.processes import Message
    from accelcheck.core.selection import Selection

TIMEOUT = 600.0
"""Seconds that a process may be silent, during one case or the import of torch."""


@dataclass(frozen=True, slots=True)
class Facts:
    """An environment: versions, driver and runtime, and whether only one process at a time can hold the device."""

    python: str
    torch: str
    accelcheck: str
    runtime: str
    exclusive: bool


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One case in one process: its latency, by `accelcheck.measure.duet.latency`, and as a part of FP32 eager's."""

    seconds: float
    to_eager: float


@dataclass(slots=True)
class DuetCase:
    """One case.

    Attributes:
        samples: One sample per process, for each side.
        absent: Reason why a side has no further figures, by its name: the case is absent, is wrong, crashes or hangs.
        broken: Names of the sides on which it is wrong, crashes or hangs.
        apart: True if its processes run one after the other: the device allows only one, or the case failed beside
            another, which may have held memory that it needs.
        found: Result of the pairs; None before the first look.
    """

    case: str
    samples: tuple[list[ProcessSample], list[ProcessSample]] = field(default_factory=lambda: ([], []))
    absent: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    apart: bool = False
    found: duet.Duet | None = None

    @property
    def open(self) -> bool:
        """True if more pairs may still decide it."""
        return not self.absent and (self.found is None or self.found.answer is SpeedVerdict.UNDECIDED)

    @property
    def worse(self) -> bool:
        """True if B is slower, or fails where A does not."""
        if self.absent:
            return "B" in self.broken and "A" not in self.absent
        return self.found is not None and self.found.answer is SpeedVerdict.SLOWER

    def lose(self, side: DuetSide, why: str, *, broken: bool) -> None:
        """Record that a side has no further figures."""
        self.absent[side.name] = why
        if broken:
            self.broken.add(side.name)


def located(word: str) -> str:
    """The absolute path of an interpreter from a path or a name on PATH; links, as of virtual environments, stay."""
    path = shutil.which(word)
    if path is None:
        raise SideError(
            f"expected the path of a python executable such as /env/bin/python, got {word}, which is not one"
        )
    return str(Path(path).absolute())


def run_pairs(
    sides: tuple[DuetSide, DuetSide],
    selection: Selection,
    tell: Callable[[str, int], object],
    looks: Sequence[int] = duet.LOOKS,
    margin: float = duet.MARGIN,
    timeout: float = TIMEOUT,
) -> tuple[tuple[Facts, Facts], list[DuetCase]]:
    """Judge every case on both sides, then measure the correct ones in pairs of processes that run in turns.

    Each side selects from its own matrix. `tell` is called with a line of progress, and the number of pairs measured
    since the last call. `looks` are the numbers of pairs after which to look, ascending, from 2 on; decided cases are
    not measured again. Differences from `margin` on count, and a process may be silent for `timeout` seconds. A
    `SideError` where an environment cannot be used.
    """
    opened = []
    for side in sides:
        tell(f"{side.name}: judging the cases", 0)
        opened.append(_opened(side, selection, timeout))
    (facts_a, rows_a), (facts_b, rows_b) = opened
    rows = [_merged(case, sides, (rows_a.get(case), rows_b.get(case))) for case in dict.fromkeys([*rows_a, *rows_b])]
    cases = sum(row.open for row in rows)
    for row in rows:
        row.apart = facts_a.exclusive or facts_b.exclusive
    pairs = 0
    for look in looks:
        if not any(row.open for row in rows):
            break
        while pairs < look and (waiting := [row for row in rows if row.open]):
            while waiting:
                alike = [row for row in waiting if row.apart == waiting[0].apart]
                waiting = [*_measured(sides, selection, alike, timeout, pairs), *(r for r in waiting if r not in alike)]
            pairs += 1
            tell(f"measuring {sum(row.open for row in rows)} of {len(rows)} cases", 1)
        for row in rows:
            if row.open:
                ratios = [b.seconds / a.seconds for a, b in zip(*row.samples, strict=True)]
                row.found = duet.judge(ratios, cases, len(looks), margin)
        tell(f"{sum(not row.open for row in rows)} of {len(rows)} cases done", 0)
    return (facts_a, facts_b), rows


def medians(samples: Sequence[ProcessSample]) -> ProcessSample:
    """Medians over all processes of a side."""
    return ProcessSample(statistics.median(s.seconds for s in samples), statistics.median(s.to_eager for s in samples))


def _merged(case: str, sides: tuple[DuetSide, DuetSide], own: tuple[DuetCase | None, DuetCase | None]) -> DuetCase:
    row = DuetCase(case)
    for side, judged in zip(sides, own, strict=True):
        if judged is None:
            row.lose(side, "its matrix has no such case", broken=False)
        else:
            row.absent |= judged.absent
            row.broken |= judged.broken
    return row


def _opened(side: DuetSide, selection: Selection, timeout: float) -> tuple[Facts, dict[str, DuetCase]]:
    """Facts of a side, and its selected cases, judged."""
    process = _process(side, "judge", selection, timeout).finished()
    facts, rows = _introduced(process)
    waiting = list(rows.values())
    while True:
        answered = [row for row in waiting if row.case in _answers(process)[0]]
        for row, blamed, why, broken in _failures(waiting, [process], answered):
            row.lose(blamed, why, broken=broken)
        waiting = [row for row in waiting if row not in answered and not row.absent]
        if not waiting:
            return facts, rows
        selection = replace(selection, cases=tuple(row.case for row in waiting))
        process = _process(side, "judge", selection, timeout).finished()


def _introduced(process: Process) -> tuple[Facts, dict[str, DuetCase]]:
    """Facts of a side, and its cases, from its messages."""
    side = process.side
    merged: Message = {name: value for message in process.messages for name, value in message.items()}
    if "refused" in merged:
        raise (AbsentError if merged.get("absent") else SideError)(f"{side}: {merged['refused']}")
    if "hello" not in merged:
        raise SideError(
            f"{side}: expected a Python in which torch and an accelcheck that has duets can be imported. Install them "
            f"there, or name a checkout by --env-{side.name.lower()} PYTHONPATH=FOLDER. Got: {_end(process)}"
        )
    cases = map(str, _typed(side, merged, "cases", list))
    return _facts(side, merged["hello"]), {case: DuetCase(case) for case in cases}


def _measured(
    sides: tuple[DuetSide, DuetSide], selection: Selection, rows: Sequence[DuetCase], timeout: float, number: int
) -> list[DuetCase]:
    """Measure rows, all in turns or all apart, in one pair of processes; returns the rows to be measured again.

    A case that fails beside another process is measured again apart, and lost only if it fails there too.
    """
    selection = replace(selection, cases=tuple(row.case for row in rows))
    in_turns = apart if rows[0].apart else together
    with ExitStack() as stack:
        pair = [stack.enter_context(_process(side, "measure", selection, timeout)) for side in sides]
        in_turns(pair, number)
    answers = [_answers(process)[0] for process in pair]
    measured = []
    for row in rows:
        told = [own[row.case] for own in answers if row.case in own]
        right = ["wrong" not in message for message in told]
        if len(right) == len(pair) and all(right):  # those of a pair belong together
            for side, message, samples in zip(sides, told, row.samples, strict=True):
                samples.append(_sample(row, side, message))
            measured.append(row)
    for row, blamed, why, broken in _failures(rows, pair, measured):
        if in_turns is apart:
            row.lose(blamed, why, broken=broken)
        row.apart = True
    return [row for row in rows if row not in measured and not row.absent]


def _process(side: DuetSide, task: str, selection: Selection, timeout: float) -> Process:
    job = json.dumps({"task": task, "selection": asdict(selection)})
    # -P: packages of the working directory do not belong to the environment.
    return Process(side, ["-P", "-m", "accelcheck.experiments.duet_process", job], timeout)


def _answers(process: Process) -> tuple[dict[str, Message], str]:
    """Its answer for each case, and the case during which it ended; empty where it ended between cases."""
    answers: dict[str, Message] = {}
    begun = ""
    for message in process.messages:
        if "begin" in message:
            begun = str(message["begin"])
        elif begun and message.get("done") == begun:
            answers[begun] = message
            begun = ""
    return answers, begun


def _failures(
    rows: Sequence[DuetCase], processes: Sequence[Process], answered: Sequence[DuetCase]
) -> list[tuple[DuetCase, DuetSide, str, bool]]:
    """Cases without a figure, the side at fault, the reason, and whether the case is broken there.

    A process that ended during a case fails that case; one that answered nothing fails all, since the next would not
    reach them either.
    """
    failures = []
    for process in processes:
        answers, begun = _answers(process)
        for row in rows:
            message = answers.get(row.case, {})
            if "wrong" in message:
                wrong = _typed(process.side, message, "wrong", str)
                failures.append((row, process.side, wrong, _typed(process.side, message, "broken", bool)))
            elif row.case == begun and process.ended is not None:  # else it was given up with the other
                failures.append((row, process.side, _end(process), True))
    if failures or answered:
        return failures
    over = [process for process in processes if process.ended is not None]
    return [(row, process.side, f"not reached: {_end(process)}", True) for process in over for row in rows]


def _end(process: Process) -> str:
    return process.ended or "the process ended without an answer"


def _sample(row: DuetCase, side: DuetSide, message: Message) -> ProcessSample:
    numbers = [_typed(side, message, name, float) for name in ("seconds", "to_eager")]
    if not all(0.0 < number < math.inf for number in numbers):
        raise SideError(f"{side}: {row.case}: expected positive figures, got {message}")
    return ProcessSample(*numbers)


def _facts(side: DuetSide, hello: Any) -> Facts:
    spoken = hello.get("protocol") if isinstance(hello, dict) else hello
    if spoken != PROTOCOL:
        raise SideError(f"{side}: expected an accelcheck that speaks protocol {PROTOCOL} of duets, got {spoken!r}")
    python, torch, accelcheck, runtime = (
        _typed(side, hello, name, str) for name in ("python", "torch", "accelcheck", "runtime")
    )
    return Facts(python, torch, accelcheck, runtime, _typed(side, hello, "exclusive", bool))


def _typed(side: DuetSide, message: Mapping[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if isinstance(value, kind):
        return value
    raise SideError(f"{side}: expected the field {name!r} as {kind.__name__}, got {value!r}")
