"""Calls of operators as a module: arguments with places for the tensors, and results by label."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.operator_variants import LAYOUTS, MIXED, beside, laid_out


@dataclass(frozen=True)
class Hole:
    """Placeholder for a tensor argument: its place among the inputs, and True if these hold a complex one's parts."""

    place: int
    is_complex: bool


class Mark(enum.Enum):
    """Placeholder for an argument that follows the inputs: their device, or float32, which is float64 if they are."""

    DEVICE = "device"
    FLOAT = "float32"


@dataclass(frozen=True)
class SampleCall:
    """Call of an operator, labelled by operator, dtype and number of the sample, such as ``add float32 3``.

    Attributes:
        leaves, spec: Leaves and structure of its arguments: `Hole`, `Mark`, and values other than tensors.
        process: OpInfo's function that removes freedom from the output, such as the signs of eigenvectors.
        writes: True if it writes to its arguments, which are then copied first.
        smooth, empty: True if it has finite gradients; if its results have no elements.
        variant: Change of the sample: see `accelcheck.workloads.operator_variants`.
    """

    label: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    process: Callable[[Any], Any]
    writes: bool = False
    smooth: bool = True
    empty: bool = False
    variant: str = ""

    def __call__(self, anchor: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors that the operator returns; complex ones as pairs of real numbers, and numbers as tensors."""
        leaves = [_filled(leaf, anchor, tensors, copied=self.writes) for leaf in self.leaves]
        if self.variant in LAYOUTS:
            leaves = laid_out(leaves, self.variant)
        if self.variant in MIXED:
            leaves = beside(leaves, self.variant)
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(_comparable(self.process(self.function(first, *args, **kwargs)), anchor))

    def moved(self, by: int) -> SampleCall:
        """Call with its inputs at other places."""
        leaves = (Hole(leaf.place + by, leaf.is_complex) if isinstance(leaf, Hole) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))


CHOOSERS: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {"topk": (1, -1), "kthvalue": (1, -1), "median": (0, None), "nanmedian": (0, None)}
    | dict.fromkeys(("sort", "argsort", "mode", "cummax", "cummin"), (0, -1))
)
"""Operators that may give the index of any of several equal elements: place among `args` and default of ``dim``."""


@dataclass(frozen=True)
class Chooser:
    """One of `CHOOSERS`, which returns the elements at its indices in their place."""

    name: str
    function: Callable[..., Any]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.function(x, *args, **kwargs)
        place, default = CHOOSERS[self.name]
        dim = kwargs.get("dim", args[place] if len(args) > place else default)
        if dim is None or kwargs.get("stable") or not x.dim():  # the index of a number is 0
            return out
        *values, indices = out if isinstance(out, tuple) else (out,)
        if indices.dim() == x.dim():
            return *values, x.detach().gather(dim, indices)
        return *values, x.detach().gather(dim, indices.unsqueeze(dim)).squeeze(dim)


CASTS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"byte": (0, 255), "char": (-128, 127), "short": (-(2**15), 2**15 - 1), "int": (-(2**30), 2**30)}
    | {"long": (-(2**62), 2**62)}
)
"""Numbers that integers of casts have: C leaves open what others become."""


@dataclass(frozen=True)
class Cast:
    """One of `CASTS`, of numbers that its integers have."""

    name: str
    function: Callable[..., Any]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        lowest, highest = CASTS[self.name]
        known = x.nan_to_num(0.0).clamp(lowest, highest) if x.is_floating_point() else x
        return self.function(known, *args, **kwargs)


@dataclass(frozen=True)
class Written:
    """Operator that writes in place to a copy of its first argument in a layout; returns all memory of the copy."""

    layout: str
    function: Callable[..., Any]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = LAYOUTS[self.layout](x.clone())
        self.function(target, *args, **kwargs)
        return _memory(target)


@dataclass(frozen=True)
class WrittenOut:
    """Operator that writes to ``out`` in a layout; returns all memory of `out`, or the tensors of several."""

    layout: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.function(*args, **kwargs)
        out = pytree.tree_map(lambda value: LAYOUTS[self.layout](torch.ones_like(value)), made)
        self.function(*args, **kwargs, out=out)
        return _memory(out) if isinstance(out, Tensor) else out


def _memory(value: Tensor) -> Tensor:
    return value if value._base is None else value._base  # noqa: SLF001 - torch has no public name for it


def _filled(leaf: Any, anchor: Tensor, tensors: Sequence[Tensor], *, copied: bool) -> Any:
    if leaf is Mark.DEVICE:
        return anchor.device
    if leaf is Mark.FLOAT:
        return torch.float64 if anchor.dtype == torch.float64 else torch.float32
    if not isinstance(leaf, Hole):
        return leaf
    tensor = tensors[leaf.place].clone() if copied else tensors[leaf.place]
    return torch.view_as_complex(tensor) if leaf.is_complex else tensor


def _comparable(out: Any, anchor: Tensor) -> Iterator[Tensor]:
    for value in pytree.tree_leaves(out):
        if isinstance(value, (bool, int, float)):
            yield torch.as_tensor(value, device=anchor.device)
        elif isinstance(value, Tensor) and plain(value):
            yield torch.stack([value.real, value.imag], -1) if value.is_complex() else value


def plain(value: Tensor) -> bool:
    """True for a dense tensor that is neither nested nor quantized."""
    # The type is not compared: captured graphs have tensors of another type.
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


class Calls(nn.Module):
    """Calls operators. The first input, one number, gives dtype and device; the others are the tensors of all samples.

    Returns results by label, in training mode only those of calls with gradients.
    """

    def __init__(self, calls: Sequence[SampleCall]) -> None:
        super().__init__()
        self.calls = tuple(calls)

    def forward(self, anchor: Tensor, *tensors: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {call.label: call(anchor, tensors) for call in self.calls if call.smooth or not self.training}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the calls."""
        return tuple(call.label for call in self.calls)

    def without(self, labels: frozenset[str]) -> Calls:
        """Module without the calls of these labels."""
        return Calls([call for call in self.calls if call.label not in labels])

    def readers(self, place: int) -> frozenset[str]:
        """Labels of the calls that read the input at a place; the first input has no values of its own."""
        holes = {call.label: [leaf.place for leaf in call.leaves if isinstance(leaf, Hole)] for call in self.calls}
        return frozenset(label for label, places in holes.items() if place - 1 in places)
