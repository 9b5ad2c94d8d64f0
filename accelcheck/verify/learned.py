"""The models that FP32 eager on the CPU trains for a task: trained once a run, shared by techniques and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.verify.cache import Cache
    from accelcheck.workloads.task import Task


@dataclass(frozen=True)
class Learned:
    """A trained model and its examination.

    Attributes:
        state: Parameters and buffers, FP32 on the CPU, as `nn.Module.state_dict` names them.
        logits: Of the fold's samples, ``(n, classes)`` FP32 on the CPU.
        right: Whether the largest logit is that of the sample's class, ``(n,)`` bool.
    """

    state: Mapping[str, Tensor]
    logits: Tensor
    right: Tensor


def learned(cache: Cache, task: Task, seed: int, fold: int) -> Learned:
    """The model of a seed, trained without a fold and examined on it; from the cache if it is there already.

    Args:
        cache: Of the run.
        task: The task.
        seed: Of the initial parameters.
        fold: The part that is held out.
    """
    return Learned(**cache.once(f"learned/{task.name}/{seed}/{fold}", _learn, task, seed, fold))


def examine(module: nn.Module, inputs: Tensor) -> Tensor:
    """Logits of a module in evaluation mode, ``(n, classes)``."""
    module.eval()
    with torch.no_grad():
        logits: Tensor = module(inputs)
    return logits


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """Whether each sample is classified right, ``(n,)`` bool; never where a logit is NaN, which `argmax` would choose."""
    return (logits.argmax(1) == target) & ~logits.isnan().any(1)


def _learn(task: Task, seed: int, fold: int) -> dict[str, Any]:
    lesson = task.lesson(seed, fold)
    program = Program.of(lesson.training, seed=seed)
    program.run(Mode.TRAIN)
    logits = examine(program.module, lesson.inputs)
    return {"state": program.module.state_dict(), "logits": logits, "right": correct(logits, lesson.target)}
