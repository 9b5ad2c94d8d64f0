"""What an elastic job and its ranks leave each other in a `Mailbox`.

``device``; for the training of each number ``task-0`` and ``answer-0``; ``victim-0``, the process that is about to be killed;
``wanted-0-2``, the number of ranks that step 2 waits for; and the folder ``snapshots-0``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
