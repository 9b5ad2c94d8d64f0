"""Halves of a run on a device: every case is judged with workers, then timed cases run alone on the machine.

`accelcheck run`, `accelcheck check` and the sessions of noxfile.py use it, each with its own way to start pytest.
Standard library only, because nox runs this without packages.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelcheck.devices import hardware

LEVEL, WORKERS = "ACCELCHECK_LEVEL", "ACCELCHECK_WORKERS"
"""Environment variables with the level and the number of workers."""
SESSION = "ACCELCHECK_SESSION"
"""Environment variable with the command that a run is part of: its summary recommends that for the next level."""
FILES = ("--accel-journal", "--accel-profile", "--accel-resume", "--junit-xml", "--junitxml")
"""Options of written files, which each half renames."""
RAN = frozenset({0, 1, 5})
"""Exit codes of a completed pytest run: passed, failures, nothing could run."""


@dataclass(frozen=True)
class Half:
    """One run of pytest: its journal, arguments, and variables besides those of this process.

    A `timed` one times cases, alone on the machine.
    """

    journal: Path
    words: Sequence[str]
    environ: dict[str, str]
    timed: bool = False


@dataclass(frozen=True)
class Session:
    """Both halves of a run on a device.

    Attributes:
        journal: Journal of the first half, unless `more` names another one; the second half writes beside it.
        chosen: Options that select cases, for both halves.
        more: Arguments of the user for pytest; they come last, so that they win.
        command: Value of `SESSION`; empty for none.
    """

    device: str
    journal: Path
    chosen: Sequence[str] = ()
    more: Sequence[str] = ()
    command: str = ""

    def run(self, start: Callable[[Half], int], timed: Callable[[], Sequence[str] | None] = lambda: ()) -> list[int]:
        """Judges, then times unless the first half was cut off; returns the exit codes that `start` returns of pytest.

        After judging, `timed` returns further options of the second half; None to skip it.
        """
        codes = [start(self.judged())]
        if codes[0] in RAN and (chosen := timed()) is not None:
            codes.append(start(self.timed(*chosen)))
        return codes

    def judged(self) -> Half:
        """Returns the first half."""
        # A dying worker fails the case that it ran; another one takes over the rest.
        ahead = ("-n", workers(self.device), "--max-worker-restart=1000")
        words = ("--pyargs", "accelcheck.suite", *self._always(), *self.chosen, *self._option(), *ahead, *self.more)
        return Half(self.journals[0], words, self._environ())

    def timed(self, *chosen: str) -> Half:
        """Returns the second half, with files of its own, without workers, and with further options."""
        renamed = map(_renamed, (*self.chosen, *self._option(), *chosen, *joined(self.more)))
        words = ("--pyargs", "accelcheck.suite.test_speed", *self._always(), *renamed, "-n", "0")
        return Half(self.journals[1], words, self._environ(), timed=True)

    @property
    def journals(self) -> tuple[Path, Path]:
        """Journals of both halves."""
        first = self._named() or self.journal
        return first, beside(first)

    def _named(self) -> Path | None:
        """Returns the journal that the user names."""
        words = (word.partition("=") for word in reversed(joined(self.more)))
        named = (path for option, _, path in words if option in {"--accel-journal", "--accel-resume"} and path)
        return next(map(Path, named), None)

    def _option(self) -> tuple[str, ...]:
        return () if self._named() else (f"--accel-journal={self.journal}",)

    def _always(self) -> tuple[str, ...]:
        # -rfE: no reasons of skips, so that the report of accelcheck comes last.
        return (f"--accel-device={self.device}", "--accel-require", "-q", "-rfE")

    def _environ(self) -> dict[str, str]:
        return ({SESSION: self.command} if self.command else {}) | client(self.device)


def report(journals: Iterable[Path], path: Path) -> list[str]:
    """Returns arguments of Python that make an HTML report of journals."""
    return ["-m", "accelcheck.cli", "report", *map(str, journals), f"--html={path}"]


def beside(path: Path) -> Path:
    """Returns the second half's counterpart of a file of the first half."""
    return path.with_stem(f"{path.stem}-speed")


def joined(words: Sequence[str]) -> list[str]:
    """Joins each option of `FILES` with its value to one word."""
    merged: list[str] = []
    for word in words:
        if merged and merged[-1] in FILES:
            merged[-1] += f"={word}"
        else:
            merged.append(word)
    return merged


def workers(device: str) -> str:
    """Returns the number of workers: one a chip, or one a core if the device is the processor."""
    if os.environ.get(WORKERS):
        return os.environ[WORKERS]
    return str(hardware.chips(device) or (hardware.usable_cores() if device in {"cpu", "xla"} else 1))


def client(device: str) -> dict[str, str]:
    """Returns variables that the device needs: PJRT's CPU client for torch_xla without a TPU, unless one is named."""
    alone = device == "xla" and not hardware.tpu().count
    return {"PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")} if alone else {}


def _renamed(word: str) -> str:
    option, _, path = word.partition("=")
    return f"{option}={beside(Path(path))}" if option in FILES and path else word
