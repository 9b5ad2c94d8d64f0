"""The two halves of a run on a device: every case with workers, then the timed cases alone on the machine.

Standard library only, because nox runs this without packages.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.devices import hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVEL, WORKERS = "ACCELCHECK_LEVEL", "ACCELCHECK_WORKERS"
"""Variables that name the level and the number of workers."""
SESSION = "ACCELCHECK_SESSION"
"""Tells a run which command it is part of: its summary recommends that command for the next level."""
FILES = ("--accel-journal", "--accel-profile", "--accel-resume", "--junit-xml", "--junitxml")
"""Options for what a run writes: each half has its own."""


def judged(device: str, chosen: Sequence[str], more: Sequence[str]) -> list[str]:
    """Arguments of pytest for the first half.

    Args:
        device: Its name.
        chosen: The selection and the journal.
        more: What the user gives to pytest; it comes last, so that it wins.
    """
    # A worker that dies fails the case that it ran; another one takes over the rest.
    ahead = ("-n", workers(device), "--max-worker-restart=1000")
    return ["--pyargs", "accelcheck.suite", *_always(device), *chosen, *ahead, *more]


def timed(device: str, chosen: Sequence[str], more: Sequence[str]) -> list[str]:
    """Arguments of pytest for the second half; as `judged`, with files of its own and without workers."""
    words = map(_renamed, (*chosen, *joined(more)))
    return ["--pyargs", "accelcheck.suite.test_speed", *_always(device), *words, "-n", "0"]


def beside(path: Path) -> Path:
    """What the second half writes where the first one writes `path`."""
    return path.with_stem(f"{path.stem}-speed")


def joined(words: Sequence[str]) -> list[str]:
    """The words, each of `FILES` with its value in one."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in FILES:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


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


def _always(device: str) -> tuple[str, ...]:
    # -rfE: not the reasons of every skip, so that the report of accelcheck comes last.
    return (f"--accel-device={device}", "--accel-require", "-q", "-rfE")


def _renamed(word: str) -> str:
    option, _, path = word.partition("=")
    return f"{option}={beside(Path(path))}" if option in FILES and path else word
