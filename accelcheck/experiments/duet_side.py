"""A process of a duet, as the parent sees it: it runs in its turns, and is stopped in the other one's. No torch.

It stops itself at the end of a turn, and so its threads, such as OpenMP's, which may spin for longer.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from accelcheck.core.processes import Child, Message
from accelcheck.measure import duet

LINES = 5
"""Number of last lines of output that are shown."""


class SideError(RuntimeError):
    """An environment cannot be used; the message says what was expected of it and what was found."""


class AbsentError(SideError):
    """An environment does not have the device."""


@dataclass(frozen=True, slots=True)
class DuetSide:
    """One of the two environments, ``A`` or ``B``: an interpreter, and variables besides those of this process."""

    name: str
    python: str
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} ({self.python})"


class Process:
    """A child process that starts with its first turn; leaving the context ends it and its descendants.

    `timeout` is the longest silence within a turn, in seconds.

    Attributes:
        messages: Messages so far.
        ended: Description of its end, empty if it did everything; None while it may have another turn, or was given up.
    """

    def __init__(self, side: DuetSide, arguments: Sequence[str], timeout: float) -> None:
        self.side, self._arguments, self._timeout = side, arguments, timeout
        self.messages: list[Message] = []
        self.ended: str | None = None
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._child is not None:
            self._child.end()

    @property
    def died(self) -> bool:
        """True if it ended before it did everything."""
        return bool(self.ended)

    @property
    def done(self) -> int:
        """Number of answered cases."""
        return sum("done" in message for message in self.messages)

    def finished(self) -> Self:
        """The process after all its turns."""
        with self:
            while self.ended is None:
                self.turn()
        return self

    def turn(self) -> None:
        """Let it run until it hands over or ends; raises `SideError` where it cannot be started."""
        if self._child is None:
            self._child = self._started()
        else:
            self._child.go_on()
        end = self._child.wait(self._timeout, silence=True, turns=True)
        self.messages = self._child.messages()
        if end is None:
            return
        how = f"the process {end}" if end.limit is None else f"hangs: silent for {end.limit:g} s (--timeout)"
        lines = [line.strip() for line in self._child.output().splitlines() if line.strip()]
        done = any("end" in message for message in self.messages)
        self.ended = "" if done else how + ("; its last output: " + " | ".join(lines[-LINES:]) if lines else "")
        self._child.end()  # what it has started may still hold the device

    def _started(self) -> Child:
        try:
            return Child(self._arguments, self.side.environ, python=self.side.python)
        except OSError as error:
            why = error.strerror or error
            raise SideError(f"{self.side}: expected a python executable; starting it: {why}") from error


def together(pair: Sequence[Process], first: int) -> None:
    """Let two processes run in turns, A B B A, until both have ended or one has died; neither gets a case ahead.

    `first` is the number of the pair: in every other pair the second process begins.
    """
    for number in itertools.count(first):
        for which in duet.order(number):
            own, other = pair[which], pair[1 - which]
            if own.ended is not None or (other.ended is None and own.done > other.done):
                continue
            own.turn()
            if own.died:
                return
        if all(process.ended is not None for process in pair):
            return


def apart(pair: Sequence[Process], first: int) -> None:
    """Let two processes run one after the other, each to its end; otherwise like `together`."""
    for which in duet.order(first):
        while pair[which].ended is None:
            pair[which].turn()
