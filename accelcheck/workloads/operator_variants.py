"""Variants of operator samples that OpInfo lacks: special values, sizes around blocks, layouts, mixed dtypes."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GOLDEN = 0.6180339887498949
"""Inverse of the golden ratio, whose multiples, modulo 1, are spread evenly over 0 to 1."""


def _placed(tensors: Sequence[Tensor], *values: float) -> list[Tensor]:
    """Puts values into each floating tensor, at different places."""
    changed = []
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            flat = tensor.contiguous().clone().reshape(-1)
            for position, value in enumerate(values):
                flat[(3 * number + 2 * position) % len(flat)] = value
            tensor = flat.reshape(tensor.shape)  # noqa: PLW2901 - the changed one stands for it
        changed.append(tensor)
    return changed


SPECIAL: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"nan": (math.nan,), "infinite": (math.inf, -math.inf), "zeros": (0.0, -0.0), "ones": (1.0, -1.0, 0.5, 2.0)}
)
"""Values put into the inputs, by variant."""
SCALED: Mapping[str, float] = MappingProxyType({"tiny": 2.0**-80, "huge": 2.0**40})
"""Factors of the inputs, by variant: squares of tiny numbers are 0 in float32, and of huge ones finite."""
RESIZED: Mapping[str, int] = MappingProxyType({f"length-{size}": size for size in (9, 34, 67, 132, 261, 1030, 4103)})
"""Sizes of the dimension that the inputs share, by variant: beyond vectors, warps and blocks by different rests."""


def _resized(tensors: Sequence[Tensor], size: int, *, last: bool) -> list[Tensor] | None:
    """Resizes the last or the first dimension of every tensor that shares its size with the largest tensor.

    New numbers lie between neighbours, so that they stay within a domain and do not repeat; integers repeat.
    """
    dim = -1 if last else 0
    largest = max((tensor for tensor in tensors if tensor.dim()), key=Tensor.numel, default=None)
    if largest is None or largest.shape[dim] == 0:
        return None
    old = largest.shape[dim]
    places = torch.arange(size) % old
    parts = torch.remainder(torch.arange(1, size + 1, dtype=torch.float64) * GOLDEN, 1.0).float()

    def longer(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[dim] != old:
            return tensor
        chosen = tensor.index_select(dim, places)
        if not tensor.is_floating_point():
            return chosen
        neighbours = tensor.index_select(dim, (places + 1) % old)
        share = parts.reshape(-1, *(1,) * (0 if last else tensor.dim() - 1))
        return chosen + (neighbours - chosen) * share

    return [longer(tensor) for tensor in tensors]


def changed(tensors: Sequence[Tensor], variant: str) -> list[list[Tensor]]:
    """Possible inputs of a call under a variant: none where it changes nothing; unchanged ones for a layout."""
    if variant in SPECIAL:
        floating = any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)
        return [_placed(tensors, *SPECIAL[variant])] if floating else []
    if variant in SCALED:
        factor = SCALED[variant]
        floating = any(map(Tensor.is_floating_point, tensors))
        return [[tensor * factor if tensor.is_floating_point() else tensor for tensor in tensors]] if floating else []
    if variant in RESIZED:
        along = (_resized(tensors, RESIZED[variant], last=last) for last in (True, False))
        return [inputs for inputs in along if inputs is not None]
    if variant in LAYOUTS and all(map(_same_layout, tensors, laid_out(tensors, variant))):
        return []
    if variant in MIXED and sum(tensor.is_floating_point() for tensor in tensors) < 2:
        return []
    return [list(tensors)] if tensors or not variant else []


MIXED: Mapping[str, torch.dtype] = MappingProxyType(
    {"float16": torch.float16, "int64": torch.int64, "int8": torch.int8}
)
"""Dtypes of all floating tensors but the first, by variant: an operator promotes them."""


def beside(leaves: Sequence[Any], variant: str) -> list[Any]:
    """Arguments of a call with all floating tensors but the first in the dtype of a variant."""
    floating = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    return [
        leaf.to(MIXED[variant]) if floats and any(floating[:place]) else leaf
        for place, (leaf, floats) in enumerate(zip(leaves, floating, strict=True))
    ]


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        **dict.fromkeys(("transposed", "transposed-first"), lambda x: x.mT.contiguous().mT if x.dim() > 1 else x),
        "spread": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
        "offset": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].reshape(x.shape),
        "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and len(x) > 1 else x,
        "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    }
)
"""Functions that give a tensor other strides, or an offset in memory, by variant."""
FIRST = frozenset({"transposed-first"})
"""Layouts of the first tensor alone."""


def laid_out(leaves: Sequence[Any], variant: str) -> list[Any]:
    """Arguments of a call with the strides of a variant."""
    layout, places = LAYOUTS[variant], [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if variant in FIRST:
        places = places[:1] if len(places) > 1 else []
    return [layout(leaf) if place in places else leaf for place, leaf in enumerate(leaves)]


def _same_layout(one: Tensor, other: Tensor) -> bool:
    return (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
