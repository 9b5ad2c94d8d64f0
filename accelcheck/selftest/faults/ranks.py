"""Faults in real ranks, of DistributedDataParallel, its hooks and FSDP2, and in snapshots.

A fault of a rank is a strategy, which is sent to the ranks by name. A fault of a process that continues a training is
an optimizer or a hook of the module, which travel with the training.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from accelcheck.devices.torch_names import disable_current_modes, pytree
from accelcheck.selftest.faults.base import Change, alike, trained
from accelcheck.selftest.faults.plant import always, changing, spoiling
from accelcheck.techniques.distributed.compression import ErrorFeedback, Int8
from accelcheck.techniques.distributed.data_parallel import SMALL_BUCKET, STRATEGY
from accelcheck.techniques.distributed.ddp import (
    Accumulating,
    Bucket,
    FullySharded,
    Future,
    HookedAveraging,
    Replicated,
)
from accelcheck.techniques.distributed.strategy import Strategy
from accelcheck.workloads.base import Program
from accelcheck.workloads.signatures import tensors_in


@always
def strategy(make: Callable[[], Strategy]) -> Change:
    """Another strategy in the ranks."""

    def change(program: Program) -> None:
        program.extras[STRATEGY] = make()

    return change


class LostBucket(HookedAveraging):
    """A rank goes on with its own gradients for the last bucket."""

    def __call__(self, bucket: Bucket) -> Future:
        own = bucket.buffer().clone()
        averaged = super().__call__(bucket)
        return averaged.then(lambda _: own) if bucket.is_last() else averaged


class SummedGradients(HookedAveraging):
    """A hook adds up the gradients of all ranks and does not divide."""

    def mean(self, total: Tensor, world: int) -> Tensor:
        return total


class Forgetful(ErrorFeedback):
    """Compresses without error feedback: the part that is not sent is lost."""

    def keep(self, parameters: Sequence[Tensor], dropped: Sequence[Tensor]) -> None:
        return


class Repeating(ErrorFeedback):
    """Adds the residual of the step before, and keeps it for the next step too."""

    def keep(self, parameters: Sequence[Tensor], dropped: Sequence[Tensor]) -> None:
        before = dict(self.residuals)
        super().keep(parameters, [part + before.get(p, 0.0) for p, part in zip(parameters, dropped, strict=True)])


class Unweighted(Replicated):
    """Ranks with unequal numbers of samples have equal weights."""

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        return super().backpropagate(program, 1.0)


class FirstRanksPart(Replicated):
    """Every rank trains on the first rank's part of the batch. Each believes that it is rank 0."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        for value in (*(value for value in program.inputs if isinstance(value, Tensor)), *tensors_in(program.target)):
            whole = torch.zeros_like(value) if distributed.get_rank() else value.clone()
            size = torch.tensor(len(value))
            distributed.all_reduce(size, distributed.ReduceOp.MIN)
            first = whole[: int(size)].clone()
            distributed.broadcast(first, 0)
            value[: int(size)] = first


class Drifting(Accumulating):
    """One rank's gradients differ from the others' by 0.1 percent after they were exchanged."""

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        loss = super().backpropagate(program, weight)
        for parameter in program.module.parameters():
            if parameter.grad is not None and distributed.get_rank() == 0:
                parameter.grad *= 1.001
        return loss


def _sharded(modules: Iterable[nn.Module]) -> list[Any]:
    return [module for module in modules if hasattr(module, "set_requires_gradient_sync")]


class StaleShards(FullySharded):
    """Gathered parameters are those from before the step. They are kept after the backward pass."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        for part in _sharded(program.module.modules()):
            part.set_reshard_after_backward(reshard_after_backward=False, recurse=False)


class SummedShards(FullySharded):
    """Gradients of shards are added up and not divided."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        for part in _sharded(program.module.modules()):
            part.set_force_sum_reduction_for_comms(enable=True)  # gloo has no sum with a factor
            part.set_gradient_divide_factor(1.0)


class UnreducedShards(FullySharded):
    """The gradients of one block are not exchanged in the first step."""

    def prepare(self, program: Program) -> None:
        super().prepare(program)
        last, passes = _sharded(program.module.children())[-1], itertools.count()

        def synced(*_: Any) -> None:
            last.set_requires_gradient_sync(requires_gradient_sync=next(passes) > 0)

        program.module.register_forward_pre_hook(synced)


def _bucketed(kind: type[Replicated] = Replicated, hook: type[HookedAveraging] | None = None) -> Strategy:
    return kind(bucket_mb=SMALL_BUCKET, exchange=None if hook is None else hook())


TRAINING = (trained("train-mlp"),)


def forgets(optimizer: torch.optim.Optimizer) -> None:
    """A state that is loaded has no moments."""
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": {}})


def saves_first(optimizer: torch.optim.Optimizer) -> None:
    """A snapshot has the moments of an earlier one."""
    kept: list[Any] = []

    def stale(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not kept and state["state"]:
            kept.append(pytree.tree_map(_copied, state["state"]))
        return {**state, "state": kept[0]} if kept else state

    optimizer.register_state_dict_post_hook(stale)


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with disable_current_modes():  # on the CPU: what a lazy device has not computed yet cannot be saved later
        return value.detach().cpu().clone()


def rounded_moments(optimizer: torch.optim.Optimizer) -> None:
    """Ranks that are started again have moments that were stored in bfloat16."""

    def loading(own: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        rounded = pytree.tree_map_only(Tensor, lambda value: value.bfloat16().to(value.dtype), state["state"])
        return {**state, "state": rounded}

    optimizer.register_load_state_dict_pre_hook(loading)


@always(changing)
def buffer_lost(program: Program) -> None:
    """A buffer is 0 in the process that goes on."""
    names = [name for name, value in program.module.named_buffers() if value.is_floating_point()]
    if not names:
        raise LookupError("nothing planted: the module has no buffer")
    register: Any = program.module._register_load_state_dict_pre_hook  # noqa: SLF001 - torch has no public way
    register(BufferLost(names[-1], os.getpid()))


@dataclass(frozen=True)
class BufferLost:
    """A hook that loads zeros for one tensor.

    Attributes:
        name: Name of the tensor.
        pid: Process in which it loads the tensor as it is.
    """

    name: str
    pid: int

    def __call__(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if os.getpid() != self.pid:
            state[prefix + self.name] = torch.zeros_like(state[prefix + self.name])


ranks = alike(seeds=3)  # they take seconds to start
snapshot = alike(technique="snapshot-restore", seeds=2)
restart = alike(technique="elastic-restart", seeds=1, warm=False)  # the first training alone is disturbed

FAULTS = (
    ranks("ranks-bucket-lost", LostBucket)(
        (*TRAINING, trained("train-transformer")), strategy(lambda: _bucketed(hook=LostBucket)), technique="ddp-2"
    ),
    ranks("ranks-same-part", FirstRanksPart)(TRAINING, strategy(lambda: _bucketed(FirstRanksPart)), technique="ddp-3"),
    ranks("ranks-hook-sums", SummedGradients)(
        (trained("train-amsgrad"), *TRAINING),
        strategy(lambda: _bucketed(hook=SummedGradients)),
        number=32,
        technique="ddp-async",
    ),
    ranks("ranks-uneven-parts", Unweighted)(TRAINING, strategy(lambda: _bucketed(Unweighted)), technique="ddp-3"),
    ranks("no-error-feedback", "What compression drops of a gradient is lost.")(
        TRAINING, strategy(lambda: Replicated(exchange=Forgetful(Int8()))), number=33, technique="ddp-int8"
    ),
    ranks("error-feedback-repeated", "What compression dropped is sent again and again.")(
        TRAINING, strategy(lambda: Replicated(exchange=Repeating(Int8()))), number=33, technique="ddp-int8"
    ),
    ranks("ranks-drift")(TRAINING, strategy(Drifting), technique="ddp-no-sync"),
    ranks("shards-stale")((*TRAINING, trained("train-transformer")), strategy(StaleShards), technique="fsdp2"),
    ranks("shards-summed")(TRAINING, strategy(SummedShards), technique="fsdp2-3"),
    ranks("shards-unreduced")(TRAINING, strategy(UnreducedShards), technique="fsdp2"),
    snapshot("snapshot-moments-lost", "The process that goes on has an optimizer without moments.")(
        (trained("train-mlp"), trained("train-amsgrad")), spoiling(forgets)
    ),
    snapshot("snapshot-moments-stale")(trained("train-transformer"), spoiling(saves_first)),
    snapshot("snapshot-buffer-lost")(trained("train-cnn"), buffer_lost),
    restart("restart-moments-lost", "Ranks that are started again have an optimizer without moments.")(
        trained("train-mlp"), spoiling(forgets)
    ),
    restart("restart-moments-rounded")(trained("train-mlp"), spoiling(rounded_moments)),
)
