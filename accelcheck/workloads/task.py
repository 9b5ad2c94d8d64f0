"""A task: a workload with a real data set, whose accuracy on held-out samples is what counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.workloads.base import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accelcheck.workloads.base import Problem


def _present() -> Capability:
    return SUPPORTED


@dataclass(frozen=True)
class Lesson:
    """One fold: what to learn from, and what to be examined on.

    Attributes:
        training: The untrained problem with all samples but those of the fold.
        samples: Those samples, ``(m, ...)`` FP32 on the CPU.
        classes: Their classes, ``(m,)`` int64.
        inputs: The fold's samples, ``(n, ...)`` FP32 on the CPU.
        target: Their classes, ``(n,)`` int64.
    """

    training: Problem
    samples: Tensor
    classes: Tensor
    inputs: Tensor
    target: Tensor


@dataclass(frozen=True)
class Task(Workload):
    """A workload for the modes accuracy and learning.

    `make` gives a problem whose single input holds all samples, whose target holds their classes (int64), and whose
    module gives logits ``(n, classes)``. Samples are held out in turn, so that each is judged once a round of folds.

    Attributes:
        folds: How many parts the samples are dealt into.
        seeds: Trainings that learning mode compares; a multiple of `folds`, so that every sample weighs the same.
        least: Accuracy that FP32 eager must reach on the held-out samples of all folds. A model that learnt nothing has
            nothing to lose: whatever a technique did to it would pass.
        present: Whether the data set is here.
    """

    folds: int = 3
    seeds: int = 6
    least: float = 0.95
    present: Callable[[], Capability] = _present

    def __post_init__(self) -> None:
        if self.folds < 2 or self.seeds < 2 or self.seeds % self.folds:
            raise ValueError(
                f"{self.name}: expected two folds or more and a multiple of them as seeds, "
                f"got {self.folds} and {self.seeds}"
            )

    def lesson(self, seed: int, fold: int) -> Lesson:
        """The fold's samples, and the problem of this seed with all others."""
        whole = self.problem(seed)
        if whole.target is None:
            raise ValueError(f"{self.name}: a task needs a target: the class of each sample")
        held = deal(whole.target, self.folds) == fold
        (inputs,) = whole.inputs
        samples, classes = inputs[~held], whole.target[~held]
        training = replace(whole, inputs=(samples,), target=classes)
        return Lesson(training, samples, classes, inputs[held], whole.target[held])


def deal(classes: Tensor, folds: int) -> Tensor:
    """The fold of each sample, ``(n,)`` int64: sizes differ by one at most, and so do the counts of each class.

    Samples of one class are dealt in turn, in the order that they have.
    """
    dealt = torch.empty_like(classes)
    dealt[classes.argsort(stable=True)] = torch.arange(len(classes)) % folds
    return dealt
