"""Long sums, in blocks that are added one after the other.

Where the order of the terms has to do with their values, as with the pixels of an image, partial sums are larger than the result, and so
are their roundings. Some libraries also keep partial sums in the storage dtype: columns of convolutions, samples of a batch, rows of a norm.
"""

from __future__ import annotations

import itertools
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from accelcheck.explain.calls import OperatorCall

BLOCKS = 16
"""Most blocks of a sum that are added one after the other."""
STORED_BLOCKS = 64
"""The same where each partial sum is rounded to the storage dtype."""
MOST_TAPS = 25
"""Most places of a kernel that are taken one by one."""
SUMMED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
)
"""Positions of the factors of matrix products, by operator."""


def product(call: OperatorCall) -> Tensor:
    """A product of matrices, its depth in blocks."""
    first, second = SUMMED[call.name]
    size = max(1, -(-call.args[first].shape[-1] // BLOCKS))
    total: Tensor | None = call.args[0] if first else None
    for left, right in zip(call.args[first].split(size, -1), call.args[second].split(size, -2), strict=True):
        block = left @ right
        total = block if total is None else total + block
    assert total is not None
    return total


def _convolution_gradients(call: OperatorCall) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution: of the input tap by tap, as matrix products of columns are added up, of the others with the batch in blocks."""
    grad, x, weight, *rest, (to_input, to_weight, to_bias) = call.args
    if not len(grad):
        return tuple(call.run())
    size = max(1, -(-len(grad) // BLOCKS))
    pairs = list(zip(grad.split(size), x.split(size), strict=True))
    blocks = [call.func(one, other, weight, *rest, [False, to_weight, to_bias]) for one, other in pairs]
    taps = [call.func(grad, x, one, *rest, [True, False, False])[0] for one in (_taps(weight) if to_input else ())]
    return _added(taps) if taps else None, *(_added([one[place] for one in blocks]) for place in (1, 2))


def _norm_gradients(call: OperatorCall) -> tuple[Tensor | None, ...]:
    """The gradients of a layer norm, those of weight and bias with the rows in blocks."""
    grad, x, shape, mean, deviation, *rest = call.args
    normal = math.prod(shape)
    if not x.numel():
        return tuple(call.run())
    rows = [one.reshape(-1, *shape) for one in (grad, x)] + [
        one.reshape(-1, *[1] * len(shape)) for one in (mean, deviation)
    ]
    size = max(1, -(-(x.numel() // normal) // STORED_BLOCKS))
    split = zip(*(one.split(size) for one in rows), strict=True)
    found = [call.func(a, b, shape, c, d, *rest) for a, b, c, d in split]
    of_input = None if found[0][0] is None else torch.cat([one[0] for one in found]).reshape(x.shape)
    return of_input, *(_added([one[place] for one in found]) for place in (1, 2))


def _negative_log_likelihood(call: OperatorCall) -> tuple[Tensor, Tensor]:
    """The loss of each sample, added up one after the other; as the operator where there is none to add."""
    x, target, weight, reduction, ignored = call.args
    loss, total = call.run()
    if reduction == 0 or x.dim() != 2:
        return loss, total
    single = call.func(x, target, weight, 0, ignored)[0]
    added = _added([one.sum() for one in single.split(max(1, -(-len(single) // STORED_BLOCKS)))])
    assert added is not None
    return (added / total if reduction == 1 else added), total


def _taps(weight: Tensor) -> Iterator[Tensor]:
    """The kernel, with one of its places at a time."""
    places: list[tuple[int, ...]] = list(itertools.product(*(range(size) for size in weight.shape[2:])))
    for place in places if len(places) <= MOST_TAPS else ():
        alone = torch.zeros_like(weight)
        index: Any = (..., *place)
        alone[index] = weight[index]
        yield alone
    if len(places) > MOST_TAPS:
        yield weight


def _added(blocks: list[Tensor | None]) -> Tensor | None:
    total = blocks[0]
    for block in blocks[1:]:
        total = None if total is None or block is None else total + block
    return total


def scaled_and_shifted(call: OperatorCall) -> tuple[Tensor, ...]:
    """Batch norm with known statistics as one scale and one shift of each channel."""
    x, weight, bias, mean, variance, _, _, eps = call.args
    scale = (variance + eps).rsqrt() if weight is None else (variance + eps).rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return x * scale.reshape(shape) + shift.reshape(shape), *call.run()[1:]


STORED: Mapping[str, Callable[[OperatorCall], tuple[Tensor | None, ...]]] = MappingProxyType(
    {
        "convolution_backward": _convolution_gradients,
        "native_layer_norm_backward": _norm_gradients,
        "nll_loss_forward": _negative_log_likelihood,
    }
)
"""Functions that compute operators whose partial sums are in the storage dtype, by operator."""
