"""How ranks share a batch, and what each rank's mean counts for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelcheck.core.capability import Code, unsupported
from accelcheck.techniques.base import Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence


def shards(inputs: tuple[Any, ...], target: Tensor | None, world: int) -> list[tuple[tuple[Any, ...], Any]]:
    """Inputs and target of each rank: nearly equal parts of the batch, the first dimension of every tensor; None where there is no target.

    Raises:
        Unsupported: There are fewer samples than ranks, or tensors of different first dimensions.
    """
    sizes = {len(value) for value in (*inputs, target) if isinstance(value, Tensor)}
    if len(sizes) != 1 or min(sizes) < world:
        reason = f"a batch for {world} ranks: expected inputs and a target of one first size, at least {world}; got {sorted(sizes)}"
        raise Unsupported(unsupported(Code.NO_FEATURE, reason))
    parts = [
        value.tensor_split(world) if isinstance(value, Tensor) else (value,) * world for value in (*inputs, target)
    ]
    return [(tuple(given), wanted) for *given, wanted in zip(*parts, strict=True)]


def by_samples(sizes: Sequence[int]) -> list[float]:
    """Each rank's share of the samples: the mean over all is then the mean of the joined batch, of uneven shards too."""
    return [size / sum(sizes) for size in sizes]
