"""Tasks: workloads with a real data set, judged by their accuracy on held-out samples."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.workloads.base import Problem, Workload


def _present() -> Capability:
    return SUPPORTED


@dataclass(frozen=True)
class Lesson:
    """Untrained problem with the samples outside a fold, ``(m, ...)`` FP32, and their classes, ``(m,)`` int64.

    Inputs ``(n, ...)`` and target ``(n,)`` are the held-out samples of the fold and their classes. All are on the CPU.
    """

    training: Problem
    samples: Tensor
    classes: Tensor
    inputs: Tensor
    target: Tensor


@dataclass(frozen=True)
class Task(Workload):
    """Workload of the modes accuracy and learning: a classifier with a data set, judged by cross-validation.

    `make` returns a problem whose single input holds all samples, whose target holds their classes (int64), and whose
    module returns logits ``(n, classes)``. Each fold is held out in turn, so that every sample is judged equally often.

    Attributes:
        folds: Number of parts that the samples are divided into, 2 or more.
        seeds: Number of trainings that learning mode compares; a multiple of `folds`, which weights samples equally.
        least: Accuracy, 0 to 1, that FP32 eager must reach on the held-out samples of all folds. Without it, a model
            that learned nothing would hide every loss of accuracy.
        present: Returns the availability of the data set on this machine; cases are ``unavailable`` without it.

    Raises:
        ValueError: There are fewer than two folds or seeds, or `seeds` is no multiple of `folds`.
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
        """Held-out samples of a fold, and the problem of this seed with all other samples.

        Raises:
            ValueError: The problem has no target.
        """
        whole = self.problem(seed)
        if whole.target is None or isinstance(whole.target, tuple):
            raise ValueError(f"{self.name}: a task needs a target: the class of each sample")
        held = deal(whole.target, self.folds) == fold
        (inputs,) = whole.inputs
        samples, classes = inputs[~held], whole.target[~held]
        training = replace(whole, inputs=(samples,), target=classes)
        return Lesson(training, samples, classes, inputs[held], whole.target[held])


def deal(classes: Tensor, folds: int) -> Tensor:
    """Fold of each sample, ``(n,)`` int64. Sizes of folds, and their counts of each class, differ by at most one.

    Samples of one class are dealt to the folds in turn, in their order in the data set.
    """
    dealt = torch.empty_like(classes)
    dealt[classes.argsort(stable=True)] = torch.arange(len(classes)) % folds
    return dealt
