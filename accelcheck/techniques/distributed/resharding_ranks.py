"""A training whose number of ranks changes with every checkpoint that it goes through. It runs in the ranks of a pool.

What it needs of torch.distributed is imported there: sharding and checkpoints take most of a second to import.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from accelcheck.techniques.distributed.parallel import shards
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob
from accelcheck.techniques.processes.evidence import unlike
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accelcheck.devices.base import Device

WORLD = 3
RANKS = (2, 3, 1)
"""Of each phase. Two and three hold shards, one holds everything; the last checkpoint goes back to two, who only load it."""


@dataclass(frozen=True)
class Loaded:
    """What was seen when a checkpoint was loaded.

    Attributes:
        files: With shards, in the checkpoint.
        shards: How each parameter lay on the ranks that saved it.
        tensors: Number of tensors of module and optimizer that were loaded.
        differing: Of these, put together from all shards, those that are not bitwise what was saved.
    """

    files: int
    shards: tuple[str, ...]
    tensors: int
    differing: tuple[str, ...]


class Phase:
    """A training that some of the ranks hold between them.

    Args:
        program: With the whole module and the whole batch.
        mesh: The ranks.
    """

    def __init__(self, program: Program, mesh: DeviceMesh) -> None:
        self.program, self.mesh = program, mesh
        rank, world = mesh.get_local_rank(), mesh.size()
        parts = shards(program.inputs, program.target, world)
        program.inputs, program.target = parts[rank]
        self.weight = world * len(parts[rank][1]) / sum(len(target) for _, target in parts)
        if world > 1:
            from torch.distributed.fsdp import fully_shard

            fully_shard(program.module, mesh=mesh)
        program.backpropagate = self._backpropagate
        self.optimizer = program.begin()

    def _backpropagate(self, step: int) -> Tensor:
        del step
        # With the weight, the mean over ranks is the mean over the joined batch, of uneven parts too.
        loss = self.program.training_loss(self.program.inputs, self.program.target) * self.weight
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        mean = loss.detach()
        distributed.all_reduce(mean, group=self.mesh.get_group())
        return mean / self.mesh.size()

    def state(self) -> dict[str, Any]:
        """Module and optimizer, as a checkpoint has them: of each tensor this rank's shard."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        module, optimizer = get_state_dict(self.program.module, self.optimizer)
        return {"module": module, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state(), checkpoint_id=folder, process_group=self.mesh.get_group())

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, whoever wrote it."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.state()
        load(state, checkpoint_id=folder, process_group=self.mesh.get_group())
        set_state_dict(
            self.program.module,
            self.optimizer,
            model_state_dict=state["module"],
            optim_state_dict=state["optimizer"],
        )

    def whole(self) -> dict[str, Tensor]:
        """Every tensor of the state, whole, on the CPU; called by all ranks of the mesh."""
        return {path: _whole(value).cpu() for path, value in _leaves(self.state()) if isinstance(value, Tensor)}

    def shards(self) -> tuple[str, ...]:
        """How each parameter lies on the ranks."""
        return tuple(_placed(parameter) for parameter in self.program.module.parameters())


@dataclass(frozen=True)
class Resharded(TrainingJob):
    """Phases of other numbers of ranks, each from the checkpoint of the one before; the last one only loads.

    Attributes:
        folder: For the checkpoints: empty.
    """

    folder: Path = Path()

    @classmethod
    def within(cls, folder: Path, program: Program) -> Resharded:
        """A program's training, from its parameters as they are now."""
        job = TrainingJob.of(program, Strategy())
        return cls(job.problem, job.dtype, job.seed, job.strategy, folder)

    def run(self, device: Device) -> RankReport:
        """This rank's part. Rank 0 is in every phase; a rank that one leaves out waits for the next."""
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
        """The program as the first so many ranks hold it: as it was sent, or with nothing in it. None: not this rank."""
        mesh = _mesh(device.type, ranks)
        if distributed.get_rank() >= ranks:
            return None
        module = copy.deepcopy(self.problem.module)
        if not fresh:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(math.nan)
        program = Program.of(
            replace(self.problem, module=module),
            device=device.torch_device(),
            dtype=self.dtype,
            seed=self.seed,
            synchronize=device.synchronize,
        )
        return Phase(program, mesh)


def _hand_over(before: Phase | None, after: Phase | None, folder: Path) -> Loaded:
    """Some ranks save, others load; every rank is in one of them at least, and calls this."""
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
    """The first so many ranks; called by all. Kept, for process groups are not to be made for every training."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, list(range(ranks)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(parameter: nn.Parameter) -> str:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return "whole"
    (placement,) = parameter.placements
    split = f"split by dimension {placement.dim}" if isinstance(placement, Shard) else "replicated"
    return f"{split} over {parameter.device_mesh.size()}"
