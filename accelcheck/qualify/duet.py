"""Two environments on this machine, a process of each at a time, in turns: which of them is faster, case by case.

The parent never imports torch; the environments may have different ones, and different accelchecks. What a process says is
parsed by schema. A case that crashes or hangs is known by name, and the others go on in other processes.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.measure import duet
from accelcheck.measure.paired import Answer
from accelcheck.qualify.duet_process import PROTOCOL
from accelcheck.qualify.duet_side import AbsentError, Message, Process, Side, SideError, apart, together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelcheck.matrix import Selection

TIMEOUT = 600.0
"""Seconds that a process may be silent: of one case, or of importing torch."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an environment says of itself: versions, the device's driver and runtime, and whether it can be held by one process only."""

    python: str
    torch: str
    accelcheck: str
    runtime: str
    exclusive: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one case in one process.

    Attributes:
        seconds: As `accelcheck.measure.duet.latency` has it.
        to_eager: That as a part of FP32 eager's in the same process.
    """

    seconds: float
    to_eager: float


@dataclass(slots=True)
class Row:
    """One case.

    Attributes:
        case: Its id.
        samples: Of either side, one a process.
        absent: Why a side has no figure, or no more of them, by the side's name: it does not have the case, gets it wrong, or
            does not survive it.
        broken: The sides on which it is wrong, crashes or hangs; not those on which it does not exist.
        found: What came of the pairs; None before the first look.
    """

    case: str
    samples: tuple[list[Sample], list[Sample]] = field(default_factory=lambda: ([], []))
    absent: dict[str, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    found: duet.Duet | None = None

    @property
    def open(self) -> bool:
        """Whether more pairs may tell more."""
        return not self.absent and (self.found is None or self.found.answer is Answer.UNDECIDED)

    @property
    def worse(self) -> bool:
        """Whether B is slower, or fails where A does not."""
        if self.absent:
            return "B" in self.broken and "A" not in self.absent
        return self.found is not None and self.found.answer is Answer.SLOWER

    def lose(self, side: Side, why: str, *, broken: bool) -> None:
        """Note that a side has no more figures."""
        self.absent[side.name] = why
        if broken:
            self.broken.add(side.name)


def located(word: str) -> str:
    """The absolute path of an interpreter, from a path or a name on PATH. A link stays one: a virtual environment's is.

    Raises:
        SideError: There is none.
    """
    found = shutil.which(word)
    if found is None:
        raise SideError(f"expected the path of a python executable such as /env/bin/python, got {word}, which is none")
    return str(Path(found).absolute())


def play(
    sides: tuple[Side, Side],
    selection: Selection,
    tell: Callable[[str], object],
    looks: Sequence[int] = duet.LOOKS,
    margin: float = duet.MARGIN,
    timeout: float = TIMEOUT,
) -> tuple[tuple[Facts, Facts], list[Row]]:
    """Judge every case on both sides, then measure those that are right, in processes of both in turns.

    Args:
        sides: A and B.
        selection: Of one device; which cases that is, either side's own matrix says.
        tell: Is told how far it is.
        looks: Pairs of processes after which to look, ascending; 2 at least. What is decided is not measured again.
        margin: Relative difference that counts.
        timeout: Seconds that a process may be silent.

    Raises:
        SideError: An environment cannot be used.
    """
    opened = []
    for side in sides:
        tell(f"{side.name}: judging what is to be timed")
        opened.append(_opened(side, selection, timeout))
    (facts_a, rows_a), (facts_b, rows_b) = opened
    rows = [_merged(case, sides, (rows_a.get(case), rows_b.get(case))) for case in dict.fromkeys([*rows_a, *rows_b])]
    cases = sum(row.open for row in rows)
    in_turns = apart if facts_a.exclusive or facts_b.exclusive else together
    pairs = 0
    for look in looks:
        if not any(row.open for row in rows):
            break
        while pairs < look and (waiting := [row for row in rows if row.open]):
            while waiting:
                waiting = _measured(sides, selection, waiting, timeout, partial(in_turns, first=pairs))
            pairs += 1
        for row in rows:
            if row.open:
                ratios = [b.seconds / a.seconds for a, b in zip(*row.samples, strict=True)]
                row.found = duet.judge(ratios, cases, len(looks), margin)
        tell(f"{pairs} pairs: {sum(not row.open for row in rows)} of {len(rows)} cases done")
    return (facts_a, facts_b), rows


def medians(samples: Sequence[Sample]) -> Sample:
    """Of all processes of a side."""
    return Sample(statistics.median(s.seconds for s in samples), statistics.median(s.to_eager for s in samples))


def _merged(case: str, sides: tuple[Side, Side], own: tuple[Row | None, Row | None]) -> Row:
    row = Row(case)
    for side, found in zip(sides, own, strict=True):
        if found is None:
            row.lose(side, "its matrix has no such case", broken=False)
        else:
            row.absent |= found.absent
            row.broken |= found.broken
    return row


def _opened(side: Side, selection: Selection, timeout: float) -> tuple[Facts, dict[str, Row]]:
    """What a side is, and the selected cases, judged there."""
    process = _judged(side, selection, timeout)
    facts, rows = _introduced(process)
    waiting = list(rows.values())
    while True:
        answers, begun = _answers(process)
        for row in waiting:
            if row.case in answers:
                _wrong(row, side, answers[row.case])
        unanswered = [row for row in waiting if row.case not in answers]
        _lose(process, begun, unanswered)
        waiting = [row for row in unanswered if not row.absent]
        if not waiting:
            return facts, rows
        process = _judged(side, replace(selection, cases=tuple(row.case for row in waiting)), timeout)


def _judged(side: Side, selection: Selection, timeout: float) -> Process:
    with _process(side, "judge", selection, timeout) as process:
        while process.ended is None:
            process.turn()
    return process


def _introduced(process: Process) -> tuple[Facts, dict[str, Row]]:
    """What a side says of itself, and which cases it has."""
    side = process.side
    said: Message = {name: value for message in process.messages for name, value in message.items()}
    if "refused" in said:
        raise (AbsentError if said.get("absent") else SideError)(f"{side}: {said['refused']}")
    if "hello" not in said:
        raise SideError(
            f"{side}: expected a Python in which torch and an accelcheck that has duets can be imported. Install them there, or name a "
            f"checkout by --env-{side.name.lower()} PYTHONPATH=FOLDER. Got: {_end(process)}"
        )
    return _facts(side, said["hello"]), {str(case): Row(str(case)) for case in _typed(side, said, "cases", list)}


def _measured(
    sides: tuple[Side, Side],
    selection: Selection,
    rows: Sequence[Row],
    timeout: float,
    in_turns: Callable[[Sequence[Process]], None],
) -> list[Row]:
    """Measure rows in one pair of processes; give those that are left because another one's case ended it."""
    selection = replace(selection, cases=tuple(row.case for row in rows))
    with ExitStack() as stack:
        pair = [stack.enter_context(_process(side, "measure", selection, timeout)) for side in sides]
        in_turns(pair)
    answers = [_answers(process) for process in pair]
    left = []
    for row in rows:
        found = [own.get(row.case) for own, _ in answers]
        samples = [
            None if message is None or _wrong(row, side, message) else _sample(row, side, message)
            for side, message in zip(sides, found, strict=True)
        ]
        if samples[0] and samples[1]:  # both: those of a pair belong together
            row.samples[0].append(samples[0])
            row.samples[1].append(samples[1])
        if not all(samples):
            left.append(row)
    for process, (own, begun) in zip(pair, answers, strict=True):
        if process.ended is not None:  # else it was given up with the other
            _lose(process, begun, [row for row in left if row.case not in own])
    return [row for row in left if not row.absent]


def _process(side: Side, task: str, selection: Selection, timeout: float) -> Process:
    job = json.dumps({"task": task, "selection": asdict(selection)})
    # -P: what lies in the folder at hand is not what the environment has.
    return Process(side, ["-P", "-m", "accelcheck.qualify.duet_process", job], timeout)


def _answers(process: Process) -> tuple[dict[str, Message], str]:
    """What it says of each case, and the case that it had begun when it ended, or none."""
    answers: dict[str, Message] = {}
    begun = ""
    for message in process.messages:
        if "begin" in message:
            begun = str(message["begin"])
        elif begun and message.get("done") == begun:
            answers[begun] = message
            begun = ""
    return answers, begun


def _lose(process: Process, begun: str, unanswered: Sequence[Row]) -> None:
    """Lose the case that ended a process, or all that it did not answer, where there is none: nor would the next one reach them."""
    for row in [row for row in unanswered if row.case == begun] or unanswered:
        why = _end(process) if row.case == begun else f"not reached: {_end(process)}"
        row.lose(process.side, why, broken=True)


def _end(process: Process) -> str:
    return process.ended or "the process ended without an answer"


def _wrong(row: Row, side: Side, message: Message) -> bool:
    """Whether a side has no figure of a case; noted."""
    if "wrong" not in message:
        return False
    row.lose(side, _typed(side, message, "wrong", str), broken=_typed(side, message, "broken", bool))
    return True


def _sample(row: Row, side: Side, message: Message) -> Sample:
    numbers = [_typed(side, message, name, float) for name in ("seconds", "to_eager")]
    if not all(0.0 < number < math.inf for number in numbers):
        raise SideError(f"{side}: {row.case}: expected positive figures, got {message}")
    return Sample(*numbers)


def _facts(side: Side, hello: Any) -> Facts:
    spoken = hello.get("protocol") if isinstance(hello, dict) else hello
    if spoken != PROTOCOL:
        raise SideError(f"{side}: expected an accelcheck that speaks protocol {PROTOCOL} of duets, got {spoken!r}")
    python, torch, accelcheck, runtime = (
        _typed(side, hello, name, str) for name in ("python", "torch", "accelcheck", "runtime")
    )
    return Facts(python, torch, accelcheck, runtime, _typed(side, hello, "exclusive", bool))


def _typed(side: Side, message: Mapping[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if isinstance(value, kind):
        return value
    raise SideError(f"{side}: expected the field {name!r} as {kind.__name__}, got {value!r}")
