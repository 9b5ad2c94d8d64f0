"""Faults of trainings that go on in another process: what a snapshot loses, in the process that writes it or that reads it.

What another process does wrong is an optimizer or a hook of the module, which travel with the training to that process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.selftest.faults.base import PlantedFault, row, single
from accelcheck.selftest.faults.plant import spoiling

if TYPE_CHECKING:
    from accelcheck.workloads.base import Program


def forgets(optimizer: torch.optim.Optimizer) -> None:
    """A state that is loaded has no moments."""
    optimizer.register_load_state_dict_pre_hook(_without_moments)


def _without_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "state": {}}


def saves_first(optimizer: torch.optim.Optimizer) -> None:
    """A state that is saved has the moments of the first time it was saved."""
    kept: list[Any] = []

    def stale(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not kept and state["state"]:
            kept.append({key: {n: _copied(v) for n, v in values.items()} for key, values in state["state"].items()})
        return {**state, "state": kept[0]} if kept else state

    optimizer.register_state_dict_post_hook(stale)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with disable_current_modes():  # on the CPU: what a lazy device has not computed yet cannot be saved later
        return value.detach().cpu().clone()


def rounded_moments(optimizer: torch.optim.Optimizer) -> None:
    """Moments of a state that is loaded have been stored in bfloat16."""
    optimizer.register_load_state_dict_pre_hook(_with_rounded_moments)


def _with_rounded_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    rounded = {
        key: {
            name: value.bfloat16().to(value.dtype) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        for key, values in state["state"].items()
    }
    return {**state, "state": rounded}


def buffer_lost(program: Program) -> None:
    """The last buffer of the module is 0 in another process that has loaded it."""
    names = [name for name, value in program.module.named_buffers() if value.is_floating_point()]
    if not names:
        raise LookupError("nothing planted: the module has no buffer")
    hook = BufferLost(names[-1], os.getpid())
    program.module._register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no public way, and leaves it untyped


@dataclass(frozen=True)
class BufferLost:
    """A hook that loads zeros for one tensor.

    Attributes:
        name: Of the tensor.
        pid: The process in which it loads the tensor as it is.
    """

    name: str
    pid: int

    def __call__(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if os.getpid() != self.pid:
            state[prefix + self.name] = torch.zeros_like(state[prefix + self.name])


snapshot = row(PlantedFault, technique="snapshot-restore", seeds=2)
restart = row(PlantedFault, technique="elastic-restart", seeds=1, warm=False)  # the first training alone is disturbed

FAULTS = (
    snapshot("snapshot-moments-lost", "The process that goes on has an optimizer without moments.")(
        (single("train-mlp", Mode.TRAIN), single("train-amsgrad", Mode.TRAIN)), spoiling(forgets)
    ),
    snapshot("snapshot-moments-stale", "A snapshot has the moments of an earlier one.")(
        (single("train-transformer", Mode.TRAIN),), spoiling(saves_first)
    ),
    snapshot("snapshot-buffer-lost", "A buffer is 0 in the process that goes on.")(
        (single("train-cnn", Mode.TRAIN),), lambda _: buffer_lost
    ),
    restart("restart-moments-lost", "Ranks that are started again have an optimizer without moments.")(
        (single("train-mlp", Mode.TRAIN),), spoiling(forgets)
    ),
    restart("restart-moments-rounded", "Ranks that are started again have moments that were stored in bfloat16.")(
        (single("train-mlp", Mode.TRAIN),), spoiling(rounded_moments)
    ),
)
