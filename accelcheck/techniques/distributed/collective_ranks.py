"""Collectives alone, in the ranks: a method for each kind in `accelcheck.workloads.collectives`."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob, digest
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.workloads.collectives import Collective, uneven

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Program, Result

ALIKE = ("all_reduce", "all_gather", "broadcast")
"""Kinds that give every rank the same."""


class Calls(Strategy):
    """Calls of `torch.distributed` as users make them. Each method gets this rank's tensor, and may write to it."""

    def operation(self, call: Collective) -> Any:
        """Returns the reduction."""
        return getattr(distributed.ReduceOp, call.op.upper())

    def sum_of(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        """Reduces a tensor in place; returns the work where that may be `later`."""
        return distributed.all_reduce(own, self.operation(call), group, async_op=later)

    def all_reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Reduces over all ranks, at once or by rows, or in two groups at once."""
        if call.form == "groups":
            pair, groups = [own.clone(), own.clone()], neighbours(world)
            places = {rank: pair[0], (rank - 1) % world: pair[1]}
            works = [self.sum_of(places[number], call, groups[number], later=True) for number in sorted(places)]
            self.wait(works)
            yield from pair
        elif call.form == "asynchronous":
            works = [self.sum_of(row, call, later=True) for row in own.unbind(0)]
            torch.ones_like(own) @ torch.ones_like(own).t()  # work of this rank meanwhile
            self.wait(works)
            yield own
        else:
            self.sum_of(own, call)
            yield own

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for the last one first."""
        for work in reversed(works):
            work.wait()

    def reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Reduces on one rank."""
        distributed.reduce(own, call.root, self.operation(call))
        if rank == call.root:
            yield own

    def reduce_scatter(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Reduces, and leaves each rank its part: of one tensor, or of a list of strided or unequal ones."""
        parts = list(call.parts(own, world))
        out = torch.empty_like(parts[rank])
        if call.form:
            distributed.reduce_scatter(out, parts, self.operation(call))
        else:
            distributed.reduce_scatter_tensor(out, own[:world].flatten(), self.operation(call))
        yield out

    def all_gather(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Gathers into one tensor of either shape, or into a list of strided or unequal ones."""
        if call.form in {"", "stacked"}:  # torch documents both shapes of the result
            out = own.new_empty(*((world,) if call.form else ()), world ** (not call.form) * len(own), own.size(1))
            distributed.all_gather_into_tensor(out, own)
            yield from out if call.form else out.chunk(world)
            return
        own = own.flatten()[: uneven(rank, 0)] if call.form == "uneven" else own
        sizes = [uneven(sender, 0) for sender in range(world)]
        outs = [own.new_empty(size) if call.form == "uneven" else torch.empty_like(own) for size in sizes]
        distributed.all_gather(outs, own)
        yield from outs

    def all_to_all(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Exchanges rows of one tensor, or lists of strided or unequal ones."""
        sent = list(own[:world].unbind(0))
        received = [torch.empty_like(part) for part in sent]
        if call.form == "uneven":
            sent = [part[: uneven(rank, receiver)] for receiver, part in enumerate(sent)]
            sizes = [uneven(sender, rank) for sender in range(world)]
            out = own.new_empty(sum(sizes))
            distributed.all_to_all_single(out, torch.cat(sent), sizes, [len(part) for part in sent])
            received = list(out.split(sizes))
        elif call.form:
            distributed.all_to_all(received, sent)
        else:
            joined = torch.empty_like(own[:world])
            distributed.all_to_all_single(joined, own[:world])
            received = list(joined)
        yield from received

    def broadcast(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Sends the root's tensor to all."""
        buffer = own if rank == call.root else torch.zeros_like(own)
        distributed.broadcast(buffer, call.root)
        yield buffer

    def scatter(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Sends each rank a row of the root's tensor."""
        out = torch.empty_like(own[0])
        distributed.scatter(out, list(own[:world]) if rank == call.root else None, call.root)
        yield out

    def gather(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Collects all tensors on the root."""
        outs = [torch.empty_like(own) for _ in range(world)] if rank == call.root else None
        distributed.gather(own, outs, call.root)
        yield from outs or ()

    def send(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        """Exchanges tensors with both neighbours at once."""
        before, after = (rank - 1) % world, (rank + 1) % world
        left, right = torch.empty_like(own), torch.empty_like(own)
        operations = [
            distributed.P2POp(distributed.isend, own, after),
            distributed.P2POp(distributed.isend, own, before),
            distributed.P2POp(distributed.irecv, left, before),
            distributed.P2POp(distributed.irecv, right, after),
        ]
        self.wait(distributed.batch_isend_irecv(operations))
        yield from (left, right)


@dataclass(frozen=True)
class Calling(TrainingJob):
    """Calls of a bundle, one after the other; those that torch refuses are named."""

    def run(self, device: Device) -> RankReport:
        """Makes this rank's calls."""
        strategy, rank, world = self.strategy, distributed.get_rank(), distributed.get_world_size()
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
                    tensors = list(getattr(strategy, call.kind)(call, own, rank, world))
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    refused[call.label] = str(error).partition("\n")[0]
                    continue
                device.synchronize()
                if call.kind in ALIKE and call.form != "groups" and tensors:
                    digests[call.label] = " ".join(digest(tensor.cpu()) for tensor in tensors)
                result |= {
                    f"out[{call.label!r}][{rank}][{place}]": tensor.cpu() for place, tensor in enumerate(tensors)
                }
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


@functools.cache
def neighbours(world: int) -> list[Any]:
    """Makes the groups of each rank and the next one; called by all ranks."""
    return [distributed.new_group([rank, (rank + 1) % world]) for rank in range(world)]
