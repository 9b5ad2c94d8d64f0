"""The way of a run on a device: every case is judged with workers, then timed cases alone on the machine, then all is reported.

`accelcheck run`, `accelcheck check` and the sessions of noxfile.py go it, each with its own way to start pytest. Standard library only,
because nox runs this without packages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.devices import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LEVEL, WORKERS = "ACCELCHECK_LEVEL", "ACCELCHECK_WORKERS"
"""Variables that name the level and the number of workers."""
SESSION = "ACCELCHECK_SESSION"
"""Tells a run which command it is part of: its summary recommends that command for the next level."""
FILES = ("--accel-journal", "--accel-profile", "--accel-resume", "--junit-xml", "--junitxml")
"""Options for what a run writes: each half has its own."""
RAN = frozenset({0, 1, 5})
"""Exit codes of pytest where it came to its end: all right, some cases are not, nothing could run."""


@dataclass(frozen=True)
class Half:
    """One run of pytest.

    Attributes:
        journal: File that it writes.
        words: Arguments of pytest.
        environ: Variables besides those of this process.
        timed: Whether it times cases, alone on the machine.
    """

    journal: Path
    words: Sequence[str]
    environ: dict[str, str]
    timed: bool = False


@dataclass(frozen=True)
class Session:
    """Both halves of a run on a device.

    Attributes:
        device: Its name.
        journal: File of the first half, unless `more` names another one; the second one writes beside it.
        chosen: Options that select cases, for both.
        more: Arguments that the user gives to pytest; they come last, so that they win.
        command: The command that both are part of: their summary recommends it for the next level. Empty for none.
    """

    device: str
    journal: Path
    chosen: Sequence[str] = ()
    more: Sequence[str] = ()
    command: str = ""

    def run(self, start: Callable[[Half], int], timed: Callable[[], Sequence[str] | None] = lambda: ()) -> list[int]:
        """Judge, then time unless the first half was cut off; the exit codes of pytest.

        Args:
            start: Runs pytest, and gives its exit code.
            timed: Gives further options for what is timed, when everything is judged; None to time nothing.
        """
        codes = [start(self.judged())]
        if codes[0] in RAN and (chosen := timed()) is not None:
            codes.append(start(self.timed(*chosen)))
        return codes

    def judged(self) -> Half:
        """The first half."""
        # A worker that dies fails the case that it ran; another one takes over the rest.
        ahead = ("-n", workers(self.device), "--max-worker-restart=1000")
        words = ("--pyargs", "accelcheck.suite", *self._always(), *self.chosen, *self._option(), *ahead, *self.more)
        return Half(self.journals[0], words, self._environ())

    def timed(self, *chosen: str) -> Half:
        """The second half, with files of its own and without workers; `chosen` are further options."""
        renamed = map(_renamed, (*self.chosen, *self._option(), *chosen, *joined(self.more)))
        words = ("--pyargs", "accelcheck.suite.test_speed", *self._always(), *renamed, "-n", "0")
        return Half(self.journals[1], words, self._environ(), timed=True)

    @property
    def journals(self) -> tuple[Path, Path]:
        """The files of both halves."""
        first = self._named() or self.journal
        return first, beside(first)

    def _named(self) -> Path | None:
        """The journal that the user names."""
        for word in reversed(joined(self.more)):
            option, _, path = word.partition("=")
            if option in {"--accel-journal", "--accel-resume"} and path:
                return Path(path)
        return None

    def _option(self) -> tuple[str, ...]:
        return () if self._named() else (f"--accel-journal={self.journal}",)

    def _always(self) -> tuple[str, ...]:
        # -rfE: not the reasons of every skip, so that the report of accelcheck comes last.
        return (f"--accel-device={self.device}", "--accel-require", "-q", "-rfE")

    def _environ(self) -> dict[str, str]:
        return ({SESSION: self.command} if self.command else {}) | client(self.device)


def report(journals: Iterable[Path], path: Path) -> list[str]:
    """Arguments of Python that make an HTML report of journals."""
    return ["-m", "accelcheck.cli", "report", *map(str, journals), f"--html={path}"]


def beside(path: Path) -> Path:
    """The file that the second half writes where the first one writes `path`."""
    return path.with_stem(f"{path.stem}-speed")


def joined(words: Sequence[str]) -> list[str]:
    """The words, each of `FILES` with its value in one."""
    merged: list[str] = []
    for word in words:
        if merged and merged[-1] in FILES:
            merged[-1] += f"={word}"
        else:
            merged.append(word)
    return merged


def workers(device: str) -> str:
    """Number of workers: one a chip, or one a core where the device is the processor."""
    if os.environ.get(WORKERS):
        return os.environ[WORKERS]
    counts_of = {"cuda": hardware.nvidia, "rocm": hardware.amd, "tpu": hardware.tpu, "xla": hardware.tpu}
    chips = counts_of[device]().count if device in counts_of else 0
    return str(chips or (hardware.usable_cores() if device in {"cpu", "xla"} else 1))


def client(device: str) -> dict[str, str]:
    """Variables that the device needs: torch_xla without a TPU computes with PJRT's CPU client, unless another is named."""
    alone = device == "xla" and not hardware.tpu().count
    return {"PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")} if alone else {}


def _renamed(word: str) -> str:
    option, _, path = word.partition("=")
    return f"{option}={beside(Path(path))}" if option in FILES and path else word
