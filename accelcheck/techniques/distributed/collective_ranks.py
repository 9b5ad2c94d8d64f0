"""Collectives alone, in the ranks: the calls of the kinds in `accelcheck.workloads.collectives`."""

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob, digest
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.workloads.base import Program, Result
from accelcheck.workloads.collectives import Collective

ALIKE = ("all_reduce", "all_gather", "broadcast")
"""Kinds that give every rank the same."""
_GATHER: Any = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_SCATTER: Any = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)
"""Torch 2.13's names for older ones, which it deprecates."""


class CollectiveCalls(Strategy):
    """Calls of `torch.distributed` as users make them: a method of each kind returns this rank's result."""

    def added(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        """Reduces a tensor over all ranks, in place; returns the work where that may be `later`."""
        return distributed.all_reduce(own, _operation(call), group, async_op=later)

    def all_reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        if call.form == "groups":  # both groups of this rank at once
            pair, groups = [own.clone(), own.clone()], _neighbours(world)
            places = {rank: pair[0], (rank - 1) % world: pair[1]}
            _wait([self.added(places[number], call, groups[number], later=True) for number in sorted(places)])
            return pair
        if call.form == "asynchronous":
            works = [self.added(row, call, later=True) for row in own.unbind(0)]
            torch.ones_like(own) @ torch.ones_like(own).t()  # work of this rank meanwhile
            _wait(works)
        else:
            self.added(own, call)
        return [own]

    def reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        distributed.reduce(own, call.root, _operation(call))
        return [own] * (rank == call.root)

    def reduce_scatter(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        parts = list(call.parts(own, world))
        out = torch.empty_like(parts[rank])
        if call.form:
            distributed.reduce_scatter(out, parts, _operation(call))
        else:
            _SCATTER(out, own[:world].flatten(), _operation(call))
        return [out]

    def all_gather(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        if call.form in {"", "stacked"}:  # torch documents both shapes of the result
            out = own.new_empty((world, *own.shape) if call.form else (world * len(own), *own.shape[1:]))
            _GATHER(out, own)
            return out.unbind(0) if call.form else out.chunk(world)
        outs = [torch.empty_like(own) for _ in range(world)]
        if call.form == "uneven":
            outs = [call.cut(out.flatten(), sender, 0) for sender, out in enumerate(outs)]
            own = call.cut(own.flatten(), rank, 0)
        distributed.all_gather(outs, own)
        return outs

    def all_to_all(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        sent = [call.cut(row, rank, receiver) for receiver, row in enumerate(own[:world])]
        outs = [call.cut(torch.empty_like(own[0]), sender, rank) for sender in range(world)]
        if call.form == "transposed":
            distributed.all_to_all(outs, sent)
            return outs
        out, sizes = torch.cat(outs), [len(part) for part in outs]
        distributed.all_to_all_single(out, torch.cat(sent), sizes, [len(part) for part in sent])
        return list(torch.split(out, sizes))

    def broadcast(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        buffer = own if rank == call.root else torch.zeros_like(own)
        distributed.broadcast(buffer, call.root)
        return [buffer]

    def scatter(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        out = torch.empty_like(own[0])
        distributed.scatter(out, list(own[:world]) if rank == call.root else None, call.root)
        return [out]

    def gather(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        outs = [torch.empty_like(own) for _ in range(world)] if rank == call.root else []
        distributed.gather(own, outs or None, call.root)
        return outs

    def send(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        ends, outs = ((rank - 1) % world, (rank + 1) % world), [torch.empty_like(own), torch.empty_like(own)]
        sends = [distributed.P2POp(distributed.isend, own, end) for end in reversed(ends)]
        receives = [distributed.P2POp(distributed.irecv, out, end) for out, end in zip(outs, ends, strict=True)]
        _wait(distributed.batch_isend_irecv([*sends, *receives]))
        return outs


def _operation(call: Collective) -> Any:
    return getattr(distributed.ReduceOp, call.op.upper())


def _wait(works: Sequence[Any]) -> None:
    for work in reversed(works):
        work.wait()


@functools.cache
def _neighbours(world: int) -> list[Any]:
    return [distributed.new_group([rank, (rank + 1) % world]) for rank in range(world)]


@dataclass(frozen=True)
class Calling(TrainingJob):
    """Calls of a bundle, one after the other; those that torch refuses are named."""

    def run(self, device: Device) -> RankReport:
        calls: Any = self.strategy
        rank, world = distributed.get_rank(), distributed.get_world_size()
        program = program_on(device, self.problem, self.dtype, self.seed)
        result: Result = {}
        refused: dict[str, str] = {}
        digests: dict[str, str] = {}
        strided = 0
        with ProfilerLog(device.type) as log:
            for call, x in calls_of(program):
                own = call.own(x[rank]).clone()
                strided += not own.is_contiguous()
                try:
                    tensors = [tensor.cpu() for tensor in getattr(calls, call.kind)(call, own, rank, world)]
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    refused[call.label] = str(error).partition("\n")[0]
                    continue
                if call.kind in ALIKE and call.form != "groups":
                    digests[call.label] = " ".join(map(digest, tensors))
                result |= {f"out[{call.label!r}][{rank}][{at}]": tensor for at, tensor in enumerate(tensors)}
        names = {name: count for name, count in log.names().items() if name.startswith("c10d::")}
        facts = {"refused": refused, "strided": strided}
        return RankReport(os.getpid(), distributed.get_backend(), result, digests, [names], (), facts)


def calls_of(program: Program) -> Iterator[tuple[Collective, Tensor]]:
    """Yields the calls of a bundle, and the tensors of all ranks for each."""
    module: Any = program.module
    inputs = dict(enumerate(program.inputs))
    if not hasattr(module, "parts"):  # narrowed to the inputs that some of its parts read
        inputs, module = dict(zip(module.places, program.inputs, strict=True)), module.module
    for _, call, (place,) in module.parts:
        yield call, inputs[place]
