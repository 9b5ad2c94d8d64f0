"""Errors of summing one after the other in the accumulator's precision, computed operator by operator.

Terms that repeat, such as the gradient of a mean, round the same way each time: the error grows with their number K,
not with its square root, and no statistical model of K shows it. Sequential sums are as correct as any other order.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.verify.operators import is_float
from accelcheck.verify.precision import ACCUMULATOR

Errors = dict[int, Tensor]


def errors(name: str, args: tuple[Any, ...]) -> Errors:
    """Errors of a call, by output; empty for operators that show no sums."""
    rule = _RULES.get(name)
    return {} if rule is None else rule(*args)


def _sum(x: Tensor, over: list[int] | None = None, keep: Any = False, *_: Any) -> Errors:  # noqa: FBT002 - torch's
    return {0: _error(x, over, keep=bool(keep))} if over and x.dim() else {}


def _mean(x: Tensor, over: list[int] | None = None, *further: Any) -> Errors:
    sums = _sum(x, over, *further)
    return {place: error / max(1, math.prod(x.shape[d] for d in over or ())) for place, error in sums.items()}


def _convolution_backward(grad: Tensor, *further: Any) -> Errors:
    return {2: _error(grad, _all_but_channels(grad))} if further[-1][2] else {}


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Any, mean: Any, variance: Any, trains: Any, momentum: Any, eps: float
) -> Errors:
    """Errors from a batch's mean and variance: in the output, the mean, and the inverse deviation."""
    if not trains or x.dim() < 2:
        return {}
    over, shape = _all_but_channels(x), _along_channels(x)
    count = max(1, x.numel() // max(1, x.shape[1]))
    centred = x - x.mean(over, keepdim=True)
    of_mean = _error(x, over) / count
    of_variance = _error(centred.square(), over) / count
    inverse = (centred.square().mean(over) + eps).rsqrt()
    deviation = -0.5 * inverse**3 * of_variance
    out = centred * deviation.reshape(shape) - (of_mean * inverse).reshape(shape)
    return {0: out if weight is None else out * weight.reshape(shape), 1: of_mean, 2: deviation}


def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *further: Any) -> Errors:
    if grad.dim() < 2:
        return {}
    over, shape = _all_but_channels(grad), _along_channels(grad)
    of_bias = _error(grad, over)
    _, _, mean, inverse, trains, *_ = further
    if not (trains and is_float(mean)):
        return {2: of_bias}
    normal = (x - mean.reshape(shape)) * inverse.reshape(shape)
    of_weight = _error(grad * normal, over)
    scale = inverse if weight is None else inverse * weight
    both = of_bias.reshape(shape) + normal * of_weight.reshape(shape)
    of_input = -scale.reshape(shape) * both / max(1, grad.numel() // max(1, grad.shape[1]))
    return {0: of_input, 1: of_weight, 2: of_bias}


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _along_channels(x: Tensor) -> list[int]:
    """Shape that broadcasts one number per channel over all elements of the channel."""
    return [1, -1, *[1] * (x.dim() - 2)]


def _error(terms: Tensor, over: list[int], *, keep: bool = False) -> Tensor:
    """Error of sums over dimensions, which stay with size 1 if `keep`."""
    if not terms.dim():
        return torch.zeros_like(terms)
    dims = sorted(d % terms.dim() for d in over)
    kept = [d for d in range(terms.dim()) if d not in dims]
    shape = [1 if d in dims else n for d, n in enumerate(terms.shape)] if keep else [terms.shape[d] for d in kept]
    if terms.numel() == 0:
        return torch.zeros(shape, dtype=terms.dtype)
    rows = terms.detach().permute(*kept, *dims).reshape([*(terms.shape[d] for d in kept), -1])
    # NumPy, since torch.cumsum on the CPU adds up float32 in float64.
    single = rows.to(getattr(torch, ACCUMULATOR)).numpy()
    total = torch.from_numpy(np.add.accumulate(single, axis=-1)[..., -1].copy())
    error = total.to(terms.dtype) - torch.from_numpy(single).to(terms.dtype).sum(-1)
    error = torch.where(torch.isfinite(error), error, 0.0)  # terms are not finite, or the accumulator overflows
    return error.reshape(shape)


_RULES: Mapping[str, Callable[..., Errors]] = {
    "sum": _sum,
    "mean": _mean,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution_backward": _convolution_backward,
}
"""Functions from an operator's positional arguments to its errors, by its name."""
