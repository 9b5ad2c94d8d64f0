"""Division of a batch among ranks, and the weight of each rank's mean."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accelcheck.core.capability import Code, unsupported
from accelcheck.techniques.base import Unsupported
from accelcheck.workloads.signatures import Target, tensors_in


def shards(inputs: tuple[Any, ...], target: Target, world: int) -> list[tuple[tuple[Any, ...], Any]]:
    """Divides the first dimension of every tensor into nearly equal parts: inputs and target (or None) of each rank.

    Raises `Unsupported` if there are fewer samples than ranks, or tensors of different first dimensions.
    """
    whole = (*inputs, *tensors_in(target))
    sizes = {len(value) for value in whole if isinstance(value, Tensor)}
    if len(sizes) != 1 or min(sizes) < world:
        wanted = f"expected inputs and a target of one first size, at least {world}"
        reason = f"a batch for {world} ranks: {wanted}; got {sorted(sizes)}"
        raise Unsupported(unsupported(Code.NO_FEATURE, reason))
    parts = [value.tensor_split(world) if isinstance(value, Tensor) else (value,) * world for value in whole]
    rows = list(zip(*parts, strict=True))
    count = len(inputs)
    return [(row[:count], row[count:] if isinstance(target, tuple) else (*row[count:], None)[0]) for row in rows]


def by_samples(sizes: Sequence[int]) -> list[float]:
    """Returns each rank's share of the samples, the weight of its mean in the mean of the joined batch."""
    return [size / sum(sizes) for size in sizes]
