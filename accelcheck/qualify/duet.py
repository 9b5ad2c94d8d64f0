"""Two environments on this machine, one process of either at a time, in turns: which of them is faster, case by case.

The parent never imports torch; the environments may have different ones, and different accelchecks. What a process says is
parsed by schema. A case that crashes or hangs is known by name, and the others go on in another process.
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accelcheck.measure import duet
from accelcheck.measure.paired import Answer
from accelcheck.qualify.duet_process import MARK, PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelcheck.matrix import Selection

TIMEOUT = 600.0
"""Seconds that a process may be silent: of one case, or of importing torch."""
LINES = 5
"""Last lines of a process's standard error that are shown."""
_GRACE = 10.0  # seconds that a process may take to end when it has said everything
_TICK = 0.5

Message = dict[str, Any]


class SideError(RuntimeError):
    """An environment cannot be used; says what was expected of it and what came."""


class AbsentError(SideError):
    """The device is not there for an environment."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two environments.

    Attributes:
        name: ``A`` or ``B``.
        python: Path of its interpreter.
        environ: Variables that are set besides those that are.
    """

    name: str
    python: str
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({self.python})"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an environment says of itself: versions, and the device's driver and runtime."""

    python: str
    torch: str
    accelcheck: str
    runtime: str


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
    pairs = 0
    for look in looks:
        if not any(row.open for row in rows):
            break
        while pairs < look and (waiting := [row for row in rows if row.open]):
            for which in duet.order(pairs):
                asked = replace(selection, cases=tuple(row.case for row in waiting))
                _heard(sides[which], "measure", asked, waiting, timeout)
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
    messages, ended = _process(side, "judge", selection, timeout)
    said: Message = {name: value for message in messages for name, value in message.items()}
    if "refused" in said:
        raise (AbsentError if said.get("absent") else SideError)(f"{side}: {said['refused']}")
    if "hello" not in said:
        raise SideError(
            f"{side}: expected a Python in which torch and an accelcheck that has duets can be imported. Install them there, or name a "
            f"checkout by --env-{side.name.lower()} PYTHONPATH=FOLDER. Got: {ended}"
        )
    facts = _facts(side, said["hello"])
    rows = {str(case): Row(str(case)) for case in _typed(side, said, "cases", list)}
    _take(side, "judge", selection, list(rows.values()), timeout, (messages, ended))
    return facts, rows


def _heard(side: Side, task: str, selection: Selection, rows: Sequence[Row], timeout: float) -> None:
    _take(side, task, selection, rows, timeout, _process(side, task, selection, timeout))


def _take(
    side: Side,
    task: str,
    selection: Selection,
    rows: Sequence[Row],
    timeout: float,
    answer: tuple[list[Message], str],
) -> None:
    """Take the answers to all rows; where a case ended the process, another process answers the rest."""
    messages, ended = answer
    waiting = {row.case: row for row in rows}
    begun: Row | None = None
    for message in messages:
        if "begin" in message:
            begun = waiting.get(str(message["begin"]))
        elif begun is not None and message.get("done") == begun.case:
            _note(side, task, waiting.pop(begun.case), message)
            begun = None
    if begun is not None:
        waiting.pop(begun.case).lose(side, ended, broken=True)
        if waiting:
            _heard(side, task, replace(selection, cases=tuple(waiting)), list(waiting.values()), timeout)
        return
    for row in waiting.values():  # it began none of them: nor would the next process
        row.lose(side, f"not reached: {ended}", broken=True)


def _note(side: Side, task: str, row: Row, message: Message) -> None:
    if "wrong" in message:
        row.lose(side, _typed(side, message, "wrong", str), broken=_typed(side, message, "broken", bool))
    elif task == "measure":
        numbers = [_typed(side, message, name, float) for name in ("seconds", "to_eager")]
        if not all(0.0 < number < math.inf for number in numbers):
            raise SideError(f"{side}: {row.case}: expected positive figures, got {message}")
        row.samples[side.name == "B"].append(Sample(*numbers))


def _process(side: Side, task: str, selection: Selection, timeout: float) -> tuple[list[Message], str]:
    """Run one process to its end; give what it said, and how it ended if that was not well."""
    job = json.dumps({"task": task, "selection": asdict(selection)})
    with tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(  # noqa: S603 - the interpreter that was asked for
                # -P: what lies in the folder at hand is not what the environment has.
                [side.python, "-P", "-m", "accelcheck.qualify.duet_process", job],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **side.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise SideError(f"{side}: expected a python executable; starting it: {error.strerror or error}") from error
        messages: list[Message] = []
        try:
            how = _listen(process, messages, timeout)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what it has left behind
            process.wait()
        if "end" in (messages[-1] if messages else {}):
            return messages, "the process ended without an answer"
        err.seek(0)
        lines = [line.strip() for line in err.read().decode(errors="replace").splitlines() if line.strip()]
        words = "; its last words: " + " | ".join(lines[-LINES:]) if lines else ""
        return messages, how + words


def _listen(process: subprocess.Popen[bytes], messages: list[Message], timeout: float) -> str:
    """Collect messages until the last one, the end of the process, or too long a silence; say which."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    since = time.monotonic()
    while time.monotonic() - since < timeout:
        over = process.poll() is not None and not reader.is_alive()
        try:
            line = lines.get(timeout=0.0 if over else _TICK)
        except queue.Empty:
            # What it started may hold its output open for ever.
            if over or process.poll() is not None:
                return _status(process.returncode)
            continue
        message = _message(line)
        if message:
            since = time.monotonic()
            messages.append(message)
        if "end" in message:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            return ""
    return f"hangs: silent for {timeout:g} s (--timeout)"


def _read(out: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    with suppress(ValueError):  # closed meanwhile
        for line in out:
            lines.put(line)


def _message(line: bytes) -> Message:
    _, mark, text = line.decode(errors="replace").partition(MARK)
    with suppress(json.JSONDecodeError, RecursionError):  # cut short by a crash, or another thread wrote into it
        found = json.loads(text) if mark else {}
        return found if isinstance(found, dict) else {}
    return {}


def _status(code: int) -> str:
    return f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with status {code}"


def _facts(side: Side, hello: Any) -> Facts:
    spoken = hello.get("protocol") if isinstance(hello, dict) else hello
    if spoken != PROTOCOL:
        raise SideError(f"{side}: expected an accelcheck that speaks protocol {PROTOCOL} of duets, got {spoken!r}")
    return Facts(*(_typed(side, hello, name, str) for name in ("python", "torch", "accelcheck", "runtime")))


def _typed(side: Side, message: Mapping[str, Any], name: str, kind: type) -> Any:
    value = message.get(name)
    if isinstance(value, kind):
        return value
    raise SideError(f"{side}: expected the field {name!r} as {kind.__name__}, got {value!r}")
