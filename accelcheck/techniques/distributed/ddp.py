"""DistributedDataParallel and FSDP2 in the ranks: buckets, views, accumulation, communication hooks, shards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from accelcheck.techniques.distributed.shards import shards
from accelcheck.techniques.distributed.strategy import Strategy, Traffic
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Future: TypeAlias = torch.futures.Future[Tensor]
Bucket: TypeAlias = Any  # torch.distributed.GradBucket, which torch's annotations leave out


class Exchange:
    """Communication hook with its state, called in place of DistributedDataParallel's all-reduce."""

    calls = 0  # buckets received

    def __call__(self, bucket: Bucket) -> Future:
        """Starts the exchange; its result is the mean of all ranks' buckets, or an approximation, flat."""
        raise NotImplementedError(f"{type(self).__name__}: exchange the bucket's gradients")

    def facts(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Returns facts about a training; `names` has the name of each parameter."""
        return {"hook calls": self.calls}


class HookedAveraging(Exchange):
    """User's hook: it starts an all-reduce, and divides the sum when the all-reduce is done."""

    averaged = 0  # buckets divided

    def __call__(self, bucket: Bucket) -> Future:
        self.calls += 1
        work = distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(self._average)  # type: ignore[no-any-return]  # torch leaves then() untyped

    def _average(self, summed: torch.futures.Future[list[Tensor]]) -> Tensor:
        self.averaged += 1
        return self.mean(summed.value()[0], distributed.get_world_size())

    def mean(self, total: Tensor, world: int) -> Tensor:
        """Divides the ranks' sum."""
        return total / world

    def facts(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        return {**super().facts(names), "averaged": self.averaged}


class Replicated(Strategy):
    """Strategy of ranks with the whole module each, whose gradients DistributedDataParallel averages.

    A bucket is full at `bucket_mb` MiB; None for torch's default. With `views`, gradients are views into their buckets.
    An `exchange` of None is the all-reduce in C++.
    """

    ddp: DistributedDataParallel

    def __init__(
        self, *, bucket_mb: float | None = None, views: bool = False, exchange: Exchange | None = None
    ) -> None:
        self.bucket_mb, self.views, self.exchange = bucket_mb, views, exchange
        self.storages: list[int] = []

    def prepare(self, program: Program) -> None:
        if distributed.get_rank() > 0:
            # DistributedDataParallel copies rank 0's parameters to all ranks; otherwise the results differ.
            with torch.no_grad():
                for parameter in program.module.parameters():
                    parameter.zero_()
        self.ddp = DistributedDataParallel(
            program.module, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=self.views
        )
        exchange = self.exchange
        if exchange is not None:
            # A lambda, since torch refuses bf16_compress_hook by name where it was not built for a GPU, though gloo
            # adds bfloat16 numbers too.
            self.ddp.register_comm_hook(None, lambda _, bucket: exchange(bucket))
        program.call = self.ddp

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        loss = super().backpropagate(program, weight)
        gradients = [parameter.grad for parameter in program.module.parameters() if parameter.grad is not None]
        self.storages.append(len({gradient.untyped_storage().data_ptr() for gradient in gradients}))
        return loss

    def facts(self, program: Program) -> Mapping[str, Any]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in program.module.named_parameters()}
        noted = {} if self.exchange is None else self.exchange.facts(names)
        return {"storages": self.storages, **noted}


class Accumulating(Replicated):
    """Two micro-batches a step: ranks exchange gradients only after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[int] = []

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        parts = shards(program.inputs, program.target, 2)
        samples = sum(len(target) for _, target in parts)
        losses = []
        for number, (inputs, target) in enumerate(parts):
            last = number == len(parts) - 1
            with Traffic() as traffic, contextlib.nullcontext() if last else self.apart():
                loss = program.training_loss(inputs, target) * (weight * len(target) / samples)
                loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
            self.passes.append(traffic.calls["allreduce_"])
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        """Makes a context in which ranks do not exchange gradients."""
        return self.ddp.no_sync()

    def facts(self, program: Program) -> Mapping[str, Any]:
        return {**super().facts(program), "passes": self.passes}


class FullySharded(Strategy):
    """Strategy of `fully_shard` over the module's blocks where it has some, else over its layers, and over the rest."""

    def prepare(self, program: Program) -> None:
        self.shard(program.module)

    def shard(self, module: nn.Module, mesh: DeviceMesh | None = None) -> None:
        """Shards a module over the ranks of a mesh, or over all."""
        from torch.distributed.fsdp import fully_shard

        for block in getattr(module, "blocks", module.children()):
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def facts(self, program: Program) -> Mapping[str, Any]:
        from torch.distributed.tensor import DTensor

        parts = [parameter for parameter in program.module.parameters() if isinstance(parameter, DTensor)]
        return {
            "sharded": sum(all(placement.is_shard() for placement in part.placements) for part in parts),
            "bytes held": sum(part.to_local().nbytes for part in parts),
        }
