"""Faults in real ranks, of models that they share and of collectives, and in backward passes that update or recompute.

A fault of a rank is a strategy, which is sent to the ranks by name.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from accelcheck.selftest.faults.base import PlantedFault, Variant, backward, row, single, trained
from accelcheck.selftest.faults.ranks import TRAINING, strategy
from accelcheck.techniques.distributed.collective_ranks import Calls
from accelcheck.techniques.distributed.data_parallel import STRATEGY
from accelcheck.techniques.distributed.ddp import HookedAveraging, Replicated
from accelcheck.techniques.distributed.expert_parallel import ExpertParallel
from accelcheck.techniques.distributed.sharing import (
    MICRO_BATCHES,
    CompiledShards,
    ContextParallel,
    Pipelined,
    TensorParallel,
    mesh_of,
)
from accelcheck.techniques.optimizers.in_backward import STEPPERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accelcheck.selftest.faults.base import Change
    from accelcheck.techniques.distributed.ddp import Bucket, Future
    from accelcheck.techniques.distributed.strategy import Strategy
    from accelcheck.workloads.base import Program, Result
    from accelcheck.workloads.collectives import Collective


class LeftOut(HookedAveraging):
    """The gradients of the last rank are left out of the sum that the others divide among all."""

    def __call__(self, bucket: Bucket) -> Future:
        if distributed.get_rank() == distributed.get_world_size() - 1:
            bucket.buffer().zero_()
        return super().__call__(bucket)


class SwappedShards(TensorParallel):
    """Each rank has the part of a weight that belongs to another one."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        layer: Any = next(layer for name, layer in program.module.named_modules() if name.endswith("fc1"))
        with torch.no_grad():
            parts = layer.weight.full_tensor().tensor_split(distributed.get_world_size())
            layer.weight.to_local().copy_(parts[distributed.get_rank() - 1])


class RepeatedBias(TensorParallel):
    """Every rank adds the bias of a layer divided by rows, before the sum over ranks."""

    def prepare(self, program: Program) -> None:
        layer: Any = next(layer for name, layer in program.module.named_modules() if name.endswith("fc2"))
        super().prepare(program)
        extra = distributed.get_world_size() - 1
        layer.register_forward_hook(lambda own, _, out: out + extra * own.bias.full_tensor())


class UnreducedNorm(TensorParallel):
    """The gradient of a norm, which all ranks hold, is that of each rank's part of the sequence."""

    def prepare(self, program: Program) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        super().prepare(program)

        def own(weight: Any) -> None:
            weight.grad = DTensor.from_local(weight.grad.to_local(), weight.device_mesh, [Replicate()])

        for name, parameter in program.module.named_parameters():
            if "norm" in name:
                parameter.register_post_accumulate_grad_hook(own)


class RankedNorm(TensorParallel):
    """The gradient of a norm is divided by the number of ranks, as if they had parts of the batch."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        for name, parameter in program.module.named_parameters():
            if "norm" in name:
                parameter.register_hook(lambda gradient: gradient / distributed.get_world_size())


class DroppedBatch(Pipelined):
    """The last micro-batch of a step adds nothing to the gradients."""

    def loss(self, program: Program) -> Any:
        plain: Any = program.loss
        calls: list[int] = []

        def loss(out: Tensor, target: Tensor) -> Tensor:
            calls.append(len(out))
            own: Tensor = plain(out, target)
            return own if len(calls) % MICRO_BATCHES else own.detach() + 0.0 * own

        return loss


class SummedBatches(Pipelined):
    """Gradients of micro-batches are added up and not divided."""

    scaled = False


class OwnKeys(ContextParallel):
    """Queries see the keys and values of their own rank alone."""

    def attend(self, program: Program, mode: Any) -> Result:
        from torch.nn.functional import scaled_dot_product_attention as attention

        world, rank = distributed.get_world_size(), distributed.get_rank()
        leaves = [value.detach().chunk(world, self.sequence)[rank].requires_grad_() for value in program.inputs]
        wanted = program.cotangent("out", torch.empty_like(program.inputs[0])).chunk(world, self.sequence)[rank]
        out = attention(*leaves)
        out.backward(wanted)
        self.lengths += [leaf.size(self.sequence) for leaf in leaves]
        result = {"out": out, **{f"grad:input[{place}]": leaf.grad for place, leaf in enumerate(leaves)}}
        return {path: self.joined(value) for path, value in result.items() if value is not None}

    def joined(self, value: Tensor) -> Tensor:
        """Gathers the parts of all ranks."""
        parts = [torch.empty_like(value) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, value.detach().contiguous())
        return torch.cat(parts, self.sequence)


class SwappedParts(OwnKeys, ContextParallel):
    """Parts of the sequence come back in another order."""

    def attend(self, program: Program, mode: Any) -> Result:
        result = ContextParallel.attend(self, program, mode)
        half = result["out"].size(self.sequence) // 2
        return {**result, "out": result["out"].roll(half, self.sequence)}


class Misplaced(ExpertParallel):
    """Two tokens come back in each other's place."""

    def returned(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:2].flip(0), rows[2:]])


class UnreducedRouter(ExpertParallel):
    """Each rank has the gradients of its own tokens for the router, which all ranks hold."""

    def reduced(self, weight: Tensor) -> None:
        return


class KeptPadding(ExpertParallel):
    """An expert's results are taken from the row before, as if its padding were in front."""

    def experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        return super().experts(rows, sizes).roll(1, 0)


class UnscaledShards(CompiledShards):
    """The gradients of compiled shards are added up and not divided."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        root: Any = program.module
        for part in (root, *root.children()):
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_force_sum_reduction_for_comms(enable=True)
                part.set_gradient_divide_factor(1.0)


class HalfSums(Calls):
    """Sums are computed in bfloat16."""

    def sum_of(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        if call.op == "sum" and own.is_floating_point() and not later:
            half = own.bfloat16()
            distributed.all_reduce(half, self.operation(call), group)
            return own.copy_(half)
        return super().sum_of(own, call, group, later=later)


class SingleSums(Calls):
    """Sums of float64 are computed in float32."""

    def sum_of(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        if own.dtype != torch.float64 or call.op != "sum":
            return super().sum_of(own, call, group, later=later)
        single_sum = own.float()
        distributed.all_reduce(single_sum, self.operation(call), group)
        return own.copy_(single_sum)


class OtherMean(Calls):
    """An average in groups or of all is divided by one rank less."""

    def sum_of(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        work = super().sum_of(own, call, group, later=later)
        if call.op == "avg" and not later:
            own *= distributed.get_world_size() / (distributed.get_world_size() - 1)
        return work


class Unwaited(Calls):
    """The last of several calls at once is not waited for: its tensor is read as it was."""

    def all_reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        before = own.clone()
        for tensor in super().all_reduce(call, own, rank, world):
            if call.form == "asynchronous":
                tensor[-1] = before[-1]
            yield tensor


class Reordered(Calls):
    """Rows that all ranks send one come in the order of the next rank."""

    def all_to_all(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        received = list(super().all_to_all(call, own, rank, world))
        yield from received if call.form == "uneven" else (*received[1:], received[0])


class DriftingCopy(Calls):
    """One rank's copy of a broadcast differs in its last bit."""

    def broadcast(self, call: Collective, own: Tensor, rank: int, world: int) -> Iterator[Tensor]:
        for tensor in super().broadcast(call, own, rank, world):
            changed = rank == 1 and tensor.dtype == torch.float32
            yield tensor.nextafter(torch.full_like(tensor, 9.0)) if changed else tensor


class GatheredSums(Calls):
    """Sums are added by each rank, of gathered tensors, from the last rank to the first."""

    def sum_of(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        if call.op != "sum" or later or not own.is_contiguous():
            return super().sum_of(own, call, group, later=later)
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        return own.copy_(sum(reversed(parts[:-1]), parts[-1]))


class GatheredColumns(TensorParallel):
    """All layers are divided by columns, and their results gathered."""

    def plan(self, module: Any, dimension: int) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        whole = ColwiseParallel(output_layouts=Replicate())
        return {name: whole for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}


def _skipped(program: Program) -> None:
    """The optimizer of one parameter never steps."""
    make: Any = program.optimizer

    def made(parameters: Sequence[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        program.extras[STEPPERS][parameters[0]].step = lambda: None
        return optimizer

    program.optimizer = made


def _twice(program: Program) -> None:
    """The optimizer of one parameter steps twice."""
    make: Any = program.optimizer

    def made(parameters: Sequence[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        stepper = program.extras[STEPPERS][parameters[-1]]
        once = stepper.step
        stepper.step = lambda: (once(), once())
        return optimizer

    program.optimizer = made


ranks = row(PlantedFault, seeds=2)  # they take seconds to start
MLP, BLOCKS, ALL_REDUCE = TRAINING, backward("mlp-blocks", ("float32",)), single("all-reduce-3")


def _rows(technique: str, cells: Any, *plants: tuple[str, type[Strategy], Callable[[], Strategy]]) -> tuple[PlantedFault, ...]:
    return tuple(ranks(name, kind)(cells, strategy(make), technique=technique) for name, kind, make in plants)


def _called(cells: Any, *plants: tuple[str, type[Calls]]) -> tuple[PlantedFault, ...]:
    return _rows("collectives-3", cells, *((name, kind, kind) for name, kind in plants))


FAULTS = (
    ranks("ranks-left-out", LeftOut)(MLP, strategy(lambda: Replicated(exchange=LeftOut())), technique="ddp-3"),
    *_rows("tensor-parallel", BLOCKS, ("parts-swapped", SwappedShards, SwappedShards)),
    *_rows("tensor-parallel", BLOCKS, ("bias-on-every-rank", RepeatedBias, RepeatedBias)),
    *_rows(
        "sequence-parallel",
        BLOCKS,
        ("norm-unreduced", UnreducedNorm, partial(UnreducedNorm, sequence=True)),
        ("norm-averaged", RankedNorm, partial(RankedNorm, sequence=True)),
    ),
    *_rows("pipeline-gpipe", MLP, ("micro-batch-dropped", DroppedBatch, partial(DroppedBatch, "ScheduleGPipe"))),
    *_rows("pipeline-1f1b", MLP, ("micro-batches-summed", SummedBatches, partial(SummedBatches, "Schedule1F1B"))),
    *_rows(
        "context-parallel-allgather",
        backward("attention", ("float32",)),
        ("own-keys-alone", OwnKeys, partial(OwnKeys, "allgather")),
        ("sequence-swapped", SwappedParts, partial(SwappedParts, "allgather")),
    ),
    *_rows(
        "expert-parallel",
        backward("experts", ("float32",)),
        ("tokens-swapped", Misplaced, Misplaced),
        ("router-unreduced", UnreducedRouter, UnreducedRouter),
        ("expert-rows-shifted", KeptPadding, KeptPadding),
    ),
    *_called(
        ALL_REDUCE,
        ("sums-in-half", HalfSums),
        ("sums-in-single", SingleSums),
        ("mean-of-one-less", OtherMean),
        ("call-not-waited-for", Unwaited),
    ),
    *_called(single("all-to-all-3"), ("rows-reordered", Reordered)),
    *_called(single("broadcast-3"), ("copies-drift", DriftingCopy)),
    *(
        row(PlantedFault, technique="optimizer-in-backward")(name, plant)(trained("train-mlp"), lambda _, plant=plant: plant)
        for name, plant in (("backward-step-skipped", _skipped), ("backward-step-twice", _twice))
    ),
)

ordered = row(Variant)
VARIANTS = (
    ordered("sums-from-the-last-rank", GatheredSums)(
        ALL_REDUCE, lambda: strategy(GatheredSums)(1.0), technique="collectives-3"
    ),
    ordered("columns-gathered", GatheredColumns)(
        backward("mlp-blocks", ("float32",)), lambda: strategy(GatheredColumns)(1.0), technique="tensor-parallel"
    ),
)
