"""A process of a duet, as the parent sees it: it runs while it has the turn, and is stopped while another has it. No torch.

What it says are lines of JSON after a marker. Having said ``turn``, it waits for a line on its standard input.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Self

from accelcheck.experiments.duet_process import MARK
from accelcheck.measure import duet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
class DuetSide:
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


class Process:
    """Starts with its first turn. To be left as a context, which ends it and what it has started.

    Attributes:
        side: Whose it is.
        messages: What it has said, but for the ends of turns.
        ended: How it ended, and empty if that was well; None while it may have another turn, or was given up.
    """

    def __init__(self, side: DuetSide, arguments: Sequence[str], timeout: float) -> None:
        """Nothing is started yet.

        Args:
            side: Gives interpreter and environment.
            arguments: Of the interpreter.
            timeout: Seconds that it may be silent within a turn.
        """
        self.side = side
        self.messages: list[Message] = []
        self.ended: str | None = None
        self._command = [side.python, *arguments]
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._err.close()

    @property
    def died(self) -> bool:
        """Whether it ended, and not well."""
        return bool(self.ended)

    @property
    def done(self) -> int:
        """How many cases it has answered."""
        return sum("done" in message for message in self.messages)

    def turn(self) -> None:
        """Let it run until it hands over or ends.

        Raises:
            SideError: It cannot be started.
        """
        if self._process is None:
            self._process = self._started()
        else:
            self._process.send_signal(signal.SIGCONT)
            with suppress(BrokenPipeError):  # it died meanwhile: what follows says so
                assert self._process.stdin is not None
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
        how = self._heard(self._process)
        if how is None:
            return
        if not how:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        self._end()
        self._err.seek(0)
        lines = [line.strip() for line in self._err.read().decode(errors="replace").splitlines() if line.strip()]
        self.ended = how + ("; its last words: " + " | ".join(lines[-LINES:]) if how and lines else "")

    def stop(self) -> None:
        """Stop all its threads until its next turn: idle ones of OpenMP may spin for longer than a turn of the other lasts."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        with suppress(ChildProcessError):  # it died meanwhile: its next turn says so
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until it stands still

    def _started(self) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(  # noqa: S603 - the interpreter that was asked for
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._err,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **self.side.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise SideError(
                f"{self.side}: expected a python executable; starting it: {error.strerror or error}"
            ) from error
        assert process.stdout is not None
        self._reader = threading.Thread(target=_read, args=(process.stdout, self._lines), daemon=True)
        self._reader.start()
        return process

    def _heard(self, process: subprocess.Popen[bytes]) -> str | None:
        """Collect messages until it hands over (None), says its last one, ends, or is silent for too long."""
        since = time.monotonic()
        while time.monotonic() - since < self._timeout:
            over = process.poll() is not None and not self._reader.is_alive()
            try:
                line = self._lines.get(timeout=0.0 if over else _TICK)
            except queue.Empty:
                # What it started may hold its output open for ever.
                if over or process.poll() is not None:
                    return _status(process.returncode)
                continue
            message = _message(line)
            if "turn" in message:
                return None
            if message:
                since = time.monotonic()
                self.messages.append(message)
            if "end" in message:
                return ""
        return f"hangs: silent for {self._timeout:g} s (--timeout)"

    def _end(self) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it, and what it has left behind
        self._process.wait()
        self._process = None


def together(pair: Sequence[Process], first: int) -> None:
    """Let two run in turns, A B B A, until both are over or one has died. Neither gets a case ahead of the other.

    Args:
        pair: Not started.
        first: Number of the pair: every other one begins with the second process.
    """
    for number in itertools.count(first):
        for which in duet.order(number):
            own, other = pair[which], pair[1 - which]
            if own.ended is not None or (other.ended is None and own.done > other.done):
                continue
            own.turn()
            if own.died:
                return
            if own.ended is None:
                own.stop()
        if all(process.ended is not None for process in pair):
            return


def apart(pair: Sequence[Process], first: int) -> None:
    """Let two run one after the other, each to its end; as `together` otherwise."""
    for which in duet.order(first):
        while pair[which].ended is None:
            pair[which].turn()


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
