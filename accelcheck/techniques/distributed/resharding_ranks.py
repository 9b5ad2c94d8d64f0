"""Training whose number of ranks changes at every checkpoint. It runs in the ranks of a pool.

Torch's modules for sharding and checkpoints are imported in the ranks, because that takes most of a second.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.ddp import FullySharded
from accelcheck.techniques.distributed.sharing import divide_batch
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob
from accelcheck.techniques.processes.evidence import program_on, unlike
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORLD = 3
RANKS = (2, 3, 1)
"""Number of ranks in each phase: two and three hold shards, one holds everything. At the end two only load."""


@dataclass(frozen=True)
class Loaded:
    """Observations when a checkpoint was loaded.

    `files` counts its files with shards, and `shards` has the placement of each parameter on the ranks that saved it.
    `tensors` counts the loaded tensors of module and optimizer; `differing` names those that, joined from all shards,
    are not bitwise equal to the saved ones.
    """

    files: int
    shards: tuple[str, ...]
    tensors: int
    differing: tuple[str, ...]


class Phase:
    """Training of a whole program, sharded over the ranks of a mesh."""

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self.program, self.mesh = program, mesh
        divide_batch(program, mesh.get_group())
        if mesh.size() > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(program.module, mesh=mesh)
        self.optimizer = program.begin()

    def state(self) -> dict[str, Any]:
        """Returns the state of module and optimizer for a checkpoint: this rank's shard of each tensor."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        module, optimizer = get_state_dict(self.program.module, self.optimizer)
        return {"module": module, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Writes a checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state(), checkpoint_id=folder, process_group=self.mesh.get_group())

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint of any ranks."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.state()
        load(state, checkpoint_id=folder, process_group=self.mesh.get_group())
        set_state_dict(
            self.program.module, self.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"]
        )

    def whole(self) -> dict[str, Tensor]:
        """Gathers all tensors of the state, unsharded, on the CPU; called by all ranks of the mesh."""
        return {
            path: FullySharded().whole(value).cpu()
            for path, value in _leaves(self.state())
            if isinstance(value, Tensor)
        }

    def shards(self) -> tuple[str, ...]:
        """Returns the placement of each parameter on the ranks."""
        return tuple(_placed(parameter) for parameter in self.program.module.parameters())


@dataclass(frozen=True)
class Resharded(TrainingJob):
    """Phases of different numbers of ranks, each from the last one's checkpoint in `folder`; the last only loads."""

    folder: Path = Path()  # empty at the beginning

    @classmethod
    def within(cls, folder: Path, program: Program) -> Resharded:
        """Makes the job of a program's training, from its current parameters."""
        return replace(cls.of(program, Strategy()), folder=folder)

    def run(self, device: Device) -> RankReport:
        """Does this rank's part. Rank 0 takes part in every phase; other ranks wait in phases that do not need them."""
        device.seed(self.seed)
        total = self.problem.steps
        steps = (range(total - 2), range(total - 2, total - 1), range(total - 1, total), range(0))
        losses: list[Tensor] = []
        loads: list[Loaded] = []
        phase: Phase | None = None
        with device.strict_float32():
            for number, (ranks, own) in enumerate(zip((*RANKS, RANKS[0]), steps, strict=True)):
                before, phase = phase, self._phase(device, ranks, fresh=number == 0)
                if number:
                    loads.append(_hand_over(before, phase, self.folder / str(number)))
                if phase is not None:
                    losses += [phase.program.take(phase.optimizer, step) for step in own]
            result = {} if phase is None else phase.whole()
        result |= {f"loss[{step}]": loss.cpu() for step, loss in enumerate(losses)}
        facts = {"loads": loads}
        return RankReport(os.getpid(), distributed.get_backend(), result, digests={}, calls=(), sent=(), facts=facts)

    def _phase(self, device: Device, ranks: int, *, fresh: bool) -> Phase | None:
        """Shards the program over the first ranks, with its parameters or, unless `fresh`, NaN; None on other ranks."""
        mesh = _mesh(device.type, ranks)
        if distributed.get_rank() >= ranks:
            return None
        module = copy.deepcopy(self.problem.module)
        if not fresh:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(math.nan)
        problem = replace(self.problem, module=module)
        return Phase(program_on(device, problem, self.dtype, self.seed), mesh)


def _hand_over(before: Phase | None, after: Phase | None, folder: Path) -> Loaded:
    """Saves on some ranks and loads on others; every rank does at least one of the two, and calls this."""
    saved: Mapping[str, Tensor] = {}
    if before is not None:
        before.save(folder)
        saved = before.whole()
    distributed.barrier()  # what is loaded has been saved
    loaded: Mapping[str, Tensor] = {}
    if after is not None:
        after.load(folder)
        loaded = after.whole()
    return Loaded(
        files=len(list(folder.glob("*.distcp"))),
        shards=() if before is None else before.shards(),
        tensors=len(loaded),
        differing=tuple(unlike(dict(saved), dict(loaded))),
    )


@functools.cache
def _mesh(device_type: str, ranks: int) -> DeviceMesh:
    """Makes the mesh of the first ranks; called by all. Cached, since each mesh makes process groups."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, list(range(ranks)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _placed(parameter: nn.Parameter) -> str:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return "whole"
    (placement,) = parameter.placements
    split = f"split by dimension {placement.dim}" if isinstance(placement, Shard) else "replicated"
    return f"{split} over {parameter.device_mesh.size()}"
