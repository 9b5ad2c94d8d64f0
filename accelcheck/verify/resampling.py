"""Interpolation with coordinates that err: neighbours along one dimension after the other, each times its weight."""

import math
from typing import Any

import torch
from torch import Tensor

from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.verify import operators
from accelcheck.workloads.draw import by_value

SLOPES = {False: -0.75, True: -0.5}
"""Parameter of torch's cubic convolution, without and with antialiasing."""
CANCELLED = 4.0
"""Unit roundoffs by which a cubic weight errs: it is a sum of terms up to 6, of which up to 1 is left."""

RESAMPLED = frozenset(name for name in operators.INTERPOLATED if "upsample" in name)
"""Operators that scale the grid of positions, and their gradients."""


class Defined(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Gives interpolation in FP64 by its definition: torch's antialiasing kernel repeats a row of images 1 wide."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return defined(func, args, kwargs or {})


def defined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator, with results by the definition where it is one of `RESAMPLED` in FP64."""
    out = func(*args, **kwargs)
    if (name := operators.facts(func).name) in RESAMPLED and out.dtype == torch.float64:
        out.copy_(resampled(name, args, 0.0, torch.Generator()))
    return out


def resampled(name: str, args: tuple[Any, ...], unit: float, generator: torch.Generator) -> Tensor:
    """Result in FP64 where coordinates err by up to `unit` each, and by as much together, as their scale does.

    Coordinates that FP32 holds, as where an image is doubled, are exact.
    """
    backward, antialiased, cubic = name.endswith("_backward"), "_aa" in name, "cubic" in name
    slope = SLOPES[antialiased] if cubic else None
    x: Tensor = args[0]
    size, *extents = args[1 : 2 + backward]
    corners, *scales = args[2 + backward :]
    given = zip(extents[0][2:] if backward else x.shape[2:], size, scales or [None] * len(size), strict=True)
    for dim, (extent, length, scale) in enumerate(given, start=2):
        if length == extent and (antialiased or not cubic):
            continue  # copied, whatever the scale is
        step = (length > 1) * (extent - 1) / max(1, length - 1) if corners else 1 / scale if scale else extent / length
        shift = 0.0 if corners and not antialiased else 0.5
        places = (torch.arange(length, dtype=torch.float64) + shift) * step
        scaled = torch.tensor([step], dtype=torch.float64)
        off = sum(_errors(values, generator) * (values != values.float()) for values in (places, scaled))
        places = places * (1 + unit * off) - shift
        count = extent if backward else length
        total = x.new_zeros([count if at == dim else old for at, old in enumerate(x.shape)])
        wide = max(step, 1.0) if antialiased else None
        for neighbours, exact in _taps(places, extent, wide, slope):
            weights = exact * (1 + unit * _errors(exact, generator))
            if cubic:  # sums of terms that cancel
                weights += CANCELLED * unit / (wide or 1.0) * _errors(exact, generator)
            weights = weights.view(-1, *[1] * (x.dim() - dim - 1))
            if backward:
                total.index_add_(dim, neighbours, x * weights)
            else:
                total += x.index_select(dim, neighbours).mul_(weights)
        x = total
    return x


def _errors(values: Tensor, generator: torch.Generator) -> Tensor:
    """Errors from -1 to 1, the same of the same values."""
    return by_value(generator, values).mul_(2.0).sub_(1.0)


def _taps(places: Tensor, extent: int, wide: float | None, slope: float | None) -> list[tuple[Tensor, Tensor]]:
    """Neighbours and their weights; `wide` is the width of an antialiasing filter, None without one."""
    reach = (1 if slope is None else 2) * (wide or 1.0)
    if wide is None and slope is None:
        places = places.clamp(0, extent - 1)
    first, last = (places + 1 - reach).floor(), (places + 1 + reach).floor()
    if wide is not None:
        first, last = first.clamp(min=0), last.clamp(max=extent)
    neighbours = [first + number for number in range(math.ceil(2 * reach) + 1)]
    weights = [_weight((at - places).abs() / (wide or 1.0), slope) * (at < last) for at in neighbours]
    total = 1.0 if wide is None else sum(weights)
    return [(at.long().clamp(0, extent - 1), weight / total) for at, weight in zip(neighbours, weights, strict=True)]


def _weight(distance: Tensor, slope: float | None) -> Tensor:
    """Weight of a neighbour: linear, or a cubic convolution's."""
    if slope is None:
        return (1 - distance).clamp(min=0)
    near = ((slope + 2) * distance - (slope + 3)) * distance**2 + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * slope
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
