"""Slopes of functions of one number in forward mode, and by differences in FP64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

STEP = 2.0**-8
"""Distance of the points of a difference, whose error of order 6 is then that of FP64."""


def slope(function: Callable[[Tensor], Any], t: Tensor) -> Any:
    """Derivative of a function of one number, in forward mode."""
    return torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]


def difference(function: Callable[[Tensor], Tensor], t: Tensor, order: int = 1) -> Tensor:
    """First or second derivative of a function of one number, by differences of order 6."""
    ends = [(function(t + k * STEP), function(t - k * STEP)) for k in (1, 2, 3)]
    if order == 1:
        return sum(c * (a - b) for c, (a, b) in zip((45, -9, 1), ends, strict=True)) / (60 * STEP)
    pairs = sum(c * (a + b) for c, (a, b) in zip((270, -27, 2), ends, strict=True))
    return (pairs - 490 * function(t)) / (180 * STEP * STEP)
