"""Messages between an elastic job and its ranks in a `Mailbox`.

``device``; for training 0, ``task-0`` and ``answer-0``; ``victim-0``, the process that is about to be killed;
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
    """Training for all ranks.

    Attributes:
        problem: Problem on the CPU, in the storage dtype.
        threads: Number of torch's threads in each rank: sums depend on it.
        every: Steps between snapshots.
        victim: Step during which the last rank is killed, at the first attempt; none if negative.
        worlds: Number of ranks that each step waits for; empty if no step waits.
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
    """Report of rank 0 on a training.

    Attributes:
        state: State of the `StepwiseTraining` at the end, on the CPU.
        worlds: Number of ranks that took each step; attempts that were lost do not count.
        starts: First step of each group of ranks.
        restarts: Number of restarts by torchrun after failures.
        pid: Id of its process.
        place: Device type of its parameters.
        strays: Operators that the backend ran on the CPU, by name.
    """

    state: Mapping[str, Any]
    worlds: tuple[int, ...]
    starts: tuple[int, ...]
    restarts: int
    pid: int
    place: str
    strays: Mapping[str, int]
