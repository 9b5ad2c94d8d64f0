"""FSDP2 in the ranks: each holds a part of every parameter, and gathers the parameters of a block when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelcheck.techniques.distributed.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from accelcheck.workloads.base import Program


class FullySharded(Strategy):
    """`fully_shard` over the module's blocks where it has some, else over its layers, and over the rest."""

    def prepare(self, program: Program) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in getattr(program.module, "blocks", program.module.children()):
            if next(block.parameters(), None) is not None:
                fully_shard(block)
        fully_shard(program.module)

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
