"""Variants of operator samples that OpInfo lacks: special values, sizes around blocks, layouts, mixed dtypes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

OPTIONS = "options"
"""Variant of the samples that show most options of an operator: see `accelcheck.workloads.operator_options`."""
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
ROWS: Mapping[str, float] = MappingProxyType(
    {"rows-infinite": -math.inf, "rows-nan": math.nan, "rows-zero": 0.0, "rows-alike": 0.5}
)
"""Values of the first half of each input, by variant: rows of it are the same."""
LONG: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"long-nan": (math.nan, math.nan), "long-infinite": (math.inf, -math.inf), "long-zeros": (0.0, -0.0)}
)
"""Values put into inputs of `LENGTH`, by variant."""
UNUSUAL = frozenset({*SPECIAL, *ROWS, *LONG})
"""Variants whose results may be infinite or NaN."""
LENGTH = 267
"""Size of the dimension that such inputs share: more than a block of threads has."""
SHIFTED: Mapping[str, float] = MappingProxyType({"shifted": 2.0**10})
"""Numbers added to the inputs, by variant, beside which differences are small."""
SUBNORMAL: Mapping[str, tuple[float, ...]] = MappingProxyType({"subnormal": (2.0**-140, -(2.0**-141), 2.0**-130)})
"""Values put into the inputs, by variant: smaller than what float32 represents with all its digits."""
WIDE: Mapping[str, int] = MappingProxyType({"wide": 2**26 + 1})
"""Factors of integers, by variant: float32 has no room for the products."""
HOLLOW: Mapping[str, int] = MappingProxyType({"hollow-1": 0, "hollow-2": 1, "hollow-3": 2})
"""Dimensions of the largest input that lose all their elements, by variant, with all dimensions of their size."""
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


def _lengthened(size: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    along = (_resized(tensors, size, last=last) for last in (True, False))
    return [inputs for inputs in along if inputs is not None]


def _halved(tensor: Tensor, value: float) -> Tensor:
    """Copies a floating tensor with its first half, rounded up to whole rows, filled with a value."""
    if not tensor.is_floating_point() or not tensor.dim():
        return tensor
    copied = tensor.contiguous().clone()
    copied[: -(-len(copied) // 2)] = value
    return copied


def _hollow(number: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Inputs without elements along one of the largest one's dimensions, and along all of that size."""
    largest = max(tensors, key=Tensor.numel, default=None)
    sizes = [] if largest is None else list(dict.fromkeys(size for size in largest.shape if size))
    if len(sizes) <= number:
        return []

    def hollow(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            tensor = tensor.narrow(dim, 0, 0) if size == sizes[number] else tensor
        return tensor

    return [list(map(hollow, tensors))]


def _with_values(values: tuple[float, ...], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [_placed(tensors, *values)] if _floats(tensors) else []


def _with_rows(value: float, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[_halved(tensor, value) for tensor in tensors]] if _floats(tensors) else []


def _floats(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.is_floating_point() and tensor.numel() for tensor in tensors)


def _with_long(values: tuple[float, ...], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [_placed(inputs, *values) for inputs in _lengthened(LENGTH, tensors)]


def _changes() -> Iterator[tuple[str, Callable[[Sequence[Tensor]], list[list[Tensor]]]]]:
    """Yields variants that change inputs, and functions of the inputs that give the possible ones."""
    for variant, values in {**SPECIAL, **SUBNORMAL}.items():
        yield variant, partial(_with_values, values)
    for variant, value in ROWS.items():
        yield variant, partial(_with_rows, value)
    for variant, factor in SCALED.items():
        yield variant, partial(_mapped, partial(torch.mul, other=factor), torch.is_floating_point)
    for variant, step in SHIFTED.items():
        yield variant, partial(_mapped, partial(torch.add, other=step), torch.is_floating_point)
    for variant, factor in WIDE.items():
        yield variant, partial(_widened, factor)
    for variant, values in LONG.items():
        yield variant, partial(_with_long, values)
    for variant, size in RESIZED.items():
        yield variant, partial(_lengthened, size)
    for variant, number in HOLLOW.items():
        yield variant, partial(_hollow, number)


def _mapped(
    change: Callable[[Tensor], Tensor], changes: Callable[[Tensor], bool], tensors: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Inputs with all tensors of a kind changed."""
    if not any(map(changes, tensors)):
        return []
    return [[change(tensor) if changes(tensor) else tensor for tensor in tensors]]


def _widened(factor: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Inputs with all integers multiplied, or those of the first tensor, since others may be indices."""
    made = _mapped(partial(torch.mul, other=factor), lambda one: one.dtype == torch.int64, tensors)
    return [inputs for wide in made for inputs in (wide, [wide[0], *tensors[1:]])]


CHANGES = MappingProxyType(dict(_changes()))


def changed(tensors: Sequence[Tensor], variant: str) -> list[list[Tensor]]:
    """Possible inputs of a call under a variant: none where it changes nothing; unchanged ones for a layout."""
    if variant in CHANGES:
        return CHANGES[variant](tensors)
    same = (
        (variant in LAYOUTS and all(map(_same_layout, tensors, laid_out(tensors, variant))))
        or (variant in WRITTEN and not (tensors and _moves(tensors[0], WRITTEN[variant][0])))
        or (variant in MIXED and sum(map(Tensor.is_floating_point, tensors)) < 2)
    )
    return [list(tensors)] if not same and (tensors or variant in {"", OPTIONS}) else []


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


WRITTEN: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        f"{word}-{layout}": (layout, word == "out")
        for word in ("in-place", "out")
        for layout in ("transposed", "spread", "offset")
    }
)
"""Layouts of the tensor that an operator writes to, by variant, and True where it is given as ``out``."""


def laid_out(leaves: Sequence[Any], variant: str) -> list[Any]:
    """Arguments of a call with the strides of a variant."""
    layout, places = LAYOUTS[variant], [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if variant in FIRST:
        places = places[:1] if len(places) > 1 else []
    return [layout(leaf) if place in places else leaf for place, leaf in enumerate(leaves)]


def _moves(tensor: Tensor, layout: str) -> bool:
    """True if a layout gives a tensor gaps, another order, or an offset, which few numbers need not show."""
    moved = LAYOUTS[layout](tensor)
    return tensor.numel() > 1 and (not moved.is_contiguous() or moved.storage_offset() > 0)


def _same_layout(one: Tensor, other: Tensor) -> bool:
    return (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
