"""Optimizer steps in the backward pass: a parameter is updated, and its gradient freed, as soon as that is complete."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, exactly
from accelcheck.techniques.optimizers.steps import SUBJECTS
from accelcheck.workloads.base import Program

COUNTS = "steps of single parameters"
STEPPERS = "optimizers of single parameters"
"""Key in `Program.extras` of the optimizer of each parameter."""


class InBackward(Technique):
    """One optimizer for each parameter, which steps in a hook of the parameter's gradient."""

    name = "optimizer-in-backward"
    family = "optimizer"
    promise = "Optimizers that step in hooks of the backward pass update parameters as one step after it does."
    source = "https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"
    level = 2
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    workloads = SUBJECTS
    early = frozenset({"train-transformer"})

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if program.optimizer is None:
            raise TypeError("the trait `training` needs an optimizer; the program has none")
        make = program.optimizer
        counts = program.extras[COUNTS] = Counter[str]()
        steppers = program.extras[STEPPERS] = dict[Tensor, torch.optim.Optimizer]()

        def made(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            steppers.clear()
            steppers.update({parameter: make([parameter]) for parameter in parameters})
            return torch.optim.SGD(parameters, lr=0.0)  # its steps find no gradients

        def stepped(parameter: Tensor) -> None:
            counts["alive"] = max(counts["alive"], sum(other.grad is not None for other in steppers))
            counts["steps"] += 1
            steppers[parameter].step()
            parameter.grad = None

        for parameter in program.module.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter.register_post_accumulate_grad_hook
                hooked(stepped)
        program.optimizer = made
        program.resets.append(counts.clear)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        counts: Counter[str] = program.extras[COUNTS]
        more = counts["steps"] > program.steps
        yield Evidence(f"steps of single parameters > {program.steps}", counts["steps"], engaged=more)
        yield exactly("most gradients at a time", counts["alive"], 1)
        left = sum(parameter.grad is not None for parameter in program.module.parameters())
        yield exactly("gradients after the last step", left, 0)


TECHNIQUES: tuple[Technique, ...] = (InBackward(),)
