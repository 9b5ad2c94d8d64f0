"""Training in train mode, one step at a time. It can be saved after any step, and continued in another process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelcheck.workloads.base import Program, Result


class StepwiseTraining:
    """Training of a program in place, from the beginning or from a saved state."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.optimizer = program.begin()
        self.losses: list[Tensor] = []  # of all steps, also of those before it was loaded: 0-D, on the device

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return len(self.losses)

    def take(self) -> None:
        """Takes one step, with its batch."""
        with self.program.batches() as load:
            load(self.step)
            self.losses.append(self.program.take(self.optimizer, self.step))

    def state(self) -> dict[str, Any]:
        """Returns the state on which the next step and the result depend."""
        scaler = self.program.scaler
        return {
            "module": self.program.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "generator": torch.random.get_rng_state(),
            "losses": list(self.losses),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; parameters keep their storage."""
        self.program.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.program.scaler is not None:
            self.program.scaler.load_state_dict(state["scaler"])
        torch.random.set_rng_state(state["generator"])
        self.losses = placed(self.program, state["losses"])
        self.program.synchronize()

    def result(self) -> Result:
        """Returns the result of train mode."""
        return self.program.trained(self.losses)


def placed(program: Program, losses: Sequence[Tensor]) -> list[Tensor]:
    """Moves losses to the device of the program's parameters."""
    place = next(program.module.parameters()).device
    return [loss.to(place) for loss in losses]


def adopted(program: Program, module: Mapping[str, Tensor], losses: Sequence[Tensor]) -> Result:
    """Returns the result of train mode after a training by other processes; `program` gets the state of its module."""
    program.module.load_state_dict(module)
    return program.trained(placed(program, losses))
