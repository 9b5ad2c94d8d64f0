"""What an elastic job and its ranks say to each other: a training, what came of it, and the files both go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from accelcheck.workloads.base import Problem


@dataclass(frozen=True)
class TrainingTask:
    """A training for all ranks.

    Attributes:
        problem: On the CPU, in the storage dtype.
        dtype, seed: Of the program.
        threads: Of torch in each rank: sums depend on it.
        every: Steps between snapshots.
        victim: Step in the middle of which the last rank is killed, the first time that it is taken; none if negative.
        worlds: Number of ranks that each step waits for; none waits if it is empty.
    """

    problem: Problem
    dtype: torch.dtype
    seed: int
    threads: int
    every: int = 1
    victim: int = -1
    worlds: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingReport:
    """What rank 0 says of a training.

    Attributes:
        state: Of the `Session` at the end, on the CPU.
        worlds: Number of ranks that took each step: of those that count, not of those that were lost.
        starts: The step that each group of ranks began with.
        restarts: How often torchrun had to restart them after failures, up to the end.
        pid: Of its process.
        place: Type of the device that its parameters are on.
        strays: Operators that the backend ran on the CPU, by name.
    """

    state: Mapping[str, Any]
    worlds: tuple[int, ...]
    starts: tuple[int, ...]
    restarts: int
    pid: int
    place: str
    strays: Mapping[str, int]


@dataclass(frozen=True)
class ElasticMailbox:
    """The files of a private folder by which the ranks and whoever gives them tasks speak."""

    folder: Path

    @property
    def device(self) -> Path:
        """What ranks compute on."""
        return self.folder / "device"

    def task(self, number: int) -> Path:
        """For all ranks."""
        return self.folder / f"task-{number}"

    def answer(self, number: int) -> Path:
        """To a task."""
        return self.folder / f"answer-{number}"

    def snapshots(self, number: int) -> Path:
        """Folder with the snapshots of a task."""
        return self.folder / f"snapshots-{number}"

    def victim(self, number: int) -> Path:
        """The process that is about to be killed."""
        return self.folder / f"victim-{number}"

    def trouble(self, rank: int) -> Path:
        """The traceback of a rank that raised last: for want of another one, or for a reason of its own."""
        return self.folder / f"trouble-{rank}"

    def wanted(self, number: int, step: int) -> Path:
        """The number of ranks that a step waits for."""
        return self.folder / f"wanted-{number}-{step}"
