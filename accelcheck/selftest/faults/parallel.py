"""Faults in real ranks, of models that they share and of collectives, and of optimizer steps in backward passes.

A fault of a rank is a strategy, which is sent to the ranks by name.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from accelcheck.selftest.faults.base import HALVES, Change, Variant, alike, derived, row, single
from accelcheck.selftest.faults.ranks import TRAINING, strategy
from accelcheck.techniques.distributed.collective_ranks import CollectiveCalls
from accelcheck.techniques.distributed.data_parallel import SMALL_BUCKET
from accelcheck.techniques.distributed.ddp import Bucket, Future, HookedAveraging, Replicated
from accelcheck.techniques.distributed.expert_parallel import ExpertParallel
from accelcheck.techniques.distributed.sharing import MICRO_BATCHES, ContextParallel, Pipelined, TensorParallel
from accelcheck.techniques.optimizers.in_backward import STEPPERS
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
                parameter.register_post_accumulate_grad_hook(own)  # type: ignore[no-untyped-call]  # untyped in torch


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


class Misplaced(ExpertParallel):
    """Two tokens come back in each other's place."""

    def returned(self, rows: Tensor) -> Tensor:
        return torch.cat([rows[:2].flip(0), rows[2:]])


class UnreducedRouter(ExpertParallel):
    """Each rank has the gradients of its own tokens for the router, which all ranks hold."""

    def reduced(self, weight: Tensor) -> None:
        return


class OtherOrder(ContextParallel):
    """Parts of the sequence come back in the order of the next rank."""

    def attend(self, program: Program, mode: Any) -> Result:
        result = super().attend(program, mode)
        return {**result, "out": result["out"].roll(self.lengths[0], self.sequence)}


class HalfSums(CollectiveCalls):
    """Sums are computed in a narrower dtype: of float32 in bfloat16, of float64 in float32."""

    narrower = {torch.float32: torch.bfloat16, torch.float64: torch.float32}  # noqa: RUF012 - never changes

    def added(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        if call.op != "sum" or later or own.dtype not in self.narrower:
            return super().added(own, call, group, later=later)
        narrow = own.to(self.narrower[own.dtype])
        super().added(narrow, call, group)
        return own.copy_(narrow)


class SingleSums(HalfSums):
    """Sums of float64 are computed in float32."""

    narrower = {torch.float64: torch.float32}  # noqa: RUF012 - never changes


class OtherMean(CollectiveCalls):
    """An average is divided by one rank less."""

    def added(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        work = super().added(own, call, group, later=later)
        if call.op == "avg" and not later:
            own *= distributed.get_world_size() / (distributed.get_world_size() - 1)
        return work


class Unwaited(CollectiveCalls):
    """The last of several calls at once is not waited for: its tensor is read as it was."""

    def all_reduce(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        before = own.clone()
        (out, *others) = super().all_reduce(call, own, rank, world)
        return [torch.cat([out[:-1], before[-1:]]) if call.form == "asynchronous" else out, *others]


class Reordered(CollectiveCalls):
    """Rows come in the order of the next rank."""

    def all_to_all(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        first, *others = super().all_to_all(call, own, rank, world)
        return [first, *others] if call.form == "uneven" else [*others, first]


class DriftingCopy(CollectiveCalls):
    """One rank's copy of a broadcast differs in its last bit."""

    def broadcast(self, call: Collective, own: Tensor, rank: int, world: int) -> Sequence[Tensor]:
        (out,) = super().broadcast(call, own, rank, world)
        return [out.nextafter(torch.full_like(out, 9.0)) if rank == 1 and out.dtype == torch.float32 else out]


class GatheredSums(CollectiveCalls):
    """Sums are added by each rank, of gathered tensors, from the last rank to the first."""

    def added(self, own: Tensor, call: Collective, group: Any = None, *, later: bool = False) -> Any:
        if call.op != "sum" or later or not own.is_contiguous():
            return super().added(own, call, group, later=later)
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        return own.copy_(sum(reversed(parts[:-1]), parts[-1]))


class GatheredColumns(TensorParallel):
    """All layers are divided by columns, and their results gathered."""

    def plan(self, module: Any, dimension: int) -> dict[str, Any]:
        style = super().plan(torch.nn.Sequential(torch.nn.Linear(1, 1)), dimension)["0"]
        return {name: style for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}


def _stepping(times: int) -> Callable[[float], Change]:

    def change(program: Program) -> None:
        make: Any = program.optimizer

        def made(parameters: Sequence[Any]) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = make(parameters)
            stepper = program.extras[STEPPERS][parameters[0]]
            once = stepper.step
            stepper.step = lambda: [once() for _ in range(times)]
            return optimizer

        program.optimizer = made

    return lambda _: change


ranks = alike(seeds=2)  # they take seconds to start
ONCE = dict.fromkeys(HALVES, "ranks exchange the same elements in any dtype: planted in float32")
BLOCKS, ALL_REDUCE = derived("mlp-blocks"), single("all-reduce-3")
EXPERTS, ATTENTION = derived("experts"), derived("attention")
PIPE = "ScheduleGPipe"

FAULTS = (
    ranks("ranks-left-out", LeftOut)(
        TRAINING, strategy(lambda: Replicated(bucket_mb=SMALL_BUCKET, exchange=LeftOut())), technique="ddp-3"
    ),
    *(
        ranks(name, kind)(
            cells,
            strategy(partial(kind, **arguments)),
            technique=technique,
            absent=ONCE if technique == "collectives-3" else {},
        )
        for name, kind, cells, technique, arguments in (
            ("parts-swapped", SwappedShards, BLOCKS, "tensor-parallel", {}),
            ("bias-on-every-rank", RepeatedBias, BLOCKS, "tensor-parallel", {}),
            ("norm-unreduced", UnreducedNorm, BLOCKS, "sequence-parallel", {"sequence": True}),
            ("micro-batch-dropped", DroppedBatch, TRAINING, "pipeline-gpipe", {"schedule": PIPE}),
            ("micro-batches-summed", SummedBatches, TRAINING, "pipeline-gpipe", {"schedule": PIPE}),
            ("sequence-swapped", OtherOrder, ATTENTION, "context-parallel-allgather", {"rotation": "allgather"}),
            ("tokens-swapped", Misplaced, EXPERTS, "expert-parallel", {}),
            ("router-unreduced", UnreducedRouter, EXPERTS, "expert-parallel", {}),
            ("sums-in-half", HalfSums, ALL_REDUCE, "collectives-3", {}),
            ("sums-in-single", SingleSums, ALL_REDUCE, "collectives-3", {}),
            ("mean-of-one-less", OtherMean, ALL_REDUCE, "collectives-3", {}),
            ("call-not-waited-for", Unwaited, ALL_REDUCE, "collectives-3", {}),
            ("rows-reordered", Reordered, single("all-to-all-3"), "collectives-3", {}),
            ("copies-drift", DriftingCopy, single("broadcast-3"), "collectives-3", {}),
        )
    ),
    *(
        alike(technique="optimizer-in-backward")(name, summary)(TRAINING, _stepping(times))
        for name, summary, times in (
            ("backward-step-skipped", "The optimizer of one parameter never steps.", 0),
            ("backward-step-twice", "The optimizer of one parameter steps twice.", 2),
        )
    ),
)
VARIANTS = tuple(
    row(Variant)(name, kind)(cells, partial(strategy(kind), 1.0), technique=technique)
    for name, kind, cells, technique in (
        ("sums-from-the-last-rank", GatheredSums, ALL_REDUCE, "collectives-3"),
        ("columns-gathered", GatheredColumns, BLOCKS, "tensor-parallel"),
    )
)
