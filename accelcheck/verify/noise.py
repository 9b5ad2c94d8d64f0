"""Random numbers and errors of `accelcheck.verify.rounding` for large tensors, in chunks that stay in processor caches.

Each operation is element-wise, so that every number has the bits of a computation with whole tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK = 2**17
"""Elements of a chunk: five buffers of 1 MiB in FP64 stay in the caches of the cores that share them. With one thread,
each of 12 million elements takes 6 ns; whole tensors take 76, mostly for fresh memory in every operation."""
TINY = 2.0**-1022
FRACTION = 2**52 - 1
HALF = 1022 << 52
"""Smallest normal number of FP64, the bits of the fraction, and those of 0.5."""


@dataclass(frozen=True)
class Sums:
    """Sums, and the quantities that decide the errors of adding them up.

    Adding up K terms one after the other, each partial sum s_k is rounded: the error's variance is the sum of the
    variances u^2 s_k^2 / 3 (errors of rounding are uniform and independent; N. J. Higham and T. Mary, SIAM J. Sci.
    Comput. 41(5), 2019). If the order is independent of the values, the terms of s_k are k drawn from K without
    replacement, whose sum has the mean k S / K and the variance k (K - k) / (K (K - 1)) (Q - S^2 / K), with S the sum

        variance = u^2 K (2 S^2 + Q) / 18

    For terms of both signs S^2 is about Q, the deviation sqrt(K / 6) u |S|; for terms of one sign S^2 is up to K Q, the
    deviation sqrt(K) / 3 u |S|; where the sum cancels, Q remains. Measured with NumPy
    (``tests/verify/test_rounding.py``), sequential sums in FP32 show 0.65 to 0.8 of this deviation in every order that
    is independent of the values, since numbers lie all over a binade; sums in blocks and trees less, down to 0.03 for K
    = 4096. For terms that repeat see `accelcheck.verify.sequential`.

    Attributes:
        scale: ``u^2 / 12``: 1 / K of the variance above, for either of two uniform numbers in [-1, 1). A single number
            would never exceed 1.7 deviations, while some of a million correct sums err by 5.
        length: Terms K, one number for all sums or one for each.
        squares: Sum of squared terms Q, one for each sum, or for all (0-D).
        common: Sum S for all (0-D), where an operator does not show its terms (norms, softmax): S^2 and Q are then the
            result's mean square. None for the results themselves.
    """

    scale: float
    length: int | Tensor
    squares: Tensor
    common: Tensor | None = None

    def deviation(self, results: Tensor, out: Tensor | None = None) -> Tensor:
        """Factors of either uniform number, for these results; written into `out`, of their shape, if given."""
        if self.common is None:
            size = torch.square(results, out=out).mul_(2.0).add_(self.squares)
        else:
            size = 2.0 * self.common.square() + self.squares
        if isinstance(self.length, int):
            return size.mul_(self.length * self.scale).sqrt_()
        return torch.where(self.length > 1, (size * (self.length * self.scale)).sqrt_(), 0.0)


def order_of(tensor: Tensor) -> list[int] | None:
    """Dimensions in the order of memory without gaps; None if there are gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def perturb_(tensor: Tensor, factors: Sequence[float], unit: float, half: float, sums: Sums | None) -> bool:
    """Adds the rounding errors of `accelcheck.verify.rounding.Rounding` in place; False for unsupported tensors.

    `factors` are those of mantissas: one, and two more with `sums`. `unit` is the largest relative error of the own
    rounding, and `half` is half the distance of numbers around 0. `sums` is None for operators that sum nothing.
    """
    order = order_of(tensor)
    if order is None or tensor.dtype != torch.float64:
        return False
    flat = tensor.detach().permute(order).reshape(-1)
    lengths, squares = (None, None) if sums is None else (_flat(v, order, tensor) for v in (sums.length, sums.squares))
    size, mantissas, chance, change = (torch.empty(min(CHUNK, flat.numel()), dtype=torch.float64) for _ in range(4))
    for start in range(0, flat.numel(), CHUNK):
        own = flat[start : start + CHUNK]
        s, m, u, c = (buffer[: own.numel()] for buffer in (size, mantissas, chance, change))
        torch.abs(own, out=s)
        _mantissas(own, s, m)
        _uniform(m, factors[0], u)
        torch.mul(s, unit, out=c).clamp_(min=half).mul_(u)
        flushed = s < half
        if (count := int(flushed.count_nonzero())) and count == int((s == 0).count_nonzero()):
            c.copy_(torch.where(flushed, own, c))  # a zero keeps its sign
        elif count:
            c.copy_(torch.where(flushed, torch.where(s == 0, own, torch.where(u > 0, own.neg(), 0.0)), c))
        if sums is not None:
            here = replace(sums, length=_part(lengths, start), squares=_part(squares, start))
            deviation = here.deviation(own, s)
            for factor in factors[1:]:
                c += _uniform(m, factor, u).mul_(deviation)
        if not math.isfinite(float(c.sum())):
            c.masked_fill_(~torch.isfinite(c), 0.0)  # of NaN and infinities
        own += c
    return True


def rounded(tensor: Tensor, factor: float, unit: float) -> Tensor | None:
    """``tensor * (1 + unit * uniform)``; None for unsupported tensors."""
    order = order_of(tensor)
    if order is None or tensor.dtype != torch.float64:
        return None
    out = torch.empty_like(tensor)
    flat, into = (value.detach().permute(order).reshape(-1) for value in (tensor, out))
    size, mantissas = (torch.empty(min(CHUNK, flat.numel()), dtype=torch.float64) for _ in range(2))
    for start in range(0, flat.numel(), CHUNK):
        own, result = flat[start : start + CHUNK], into[start : start + CHUNK]
        s, m = size[: own.numel()], mantissas[: own.numel()]
        torch.abs(own, out=s)
        _mantissas(own, s, m)
        torch.mul(own, _uniform(m, factor, m).mul_(unit).add_(1), out=result)
    return out


def _flat(value: int | Tensor, order: list[int], like: Tensor) -> int | Tensor:
    if isinstance(value, int) or not value.dim():
        return value
    return value.expand(like.shape).permute(order).reshape(-1)


def _part(value: Any, start: int) -> Any:
    return value[start : start + CHUNK] if isinstance(value, torch.Tensor) and value.dim() else value


def _mantissas(own: Tensor, sizes: Tensor, out: Tensor) -> None:
    """Writes the mantissas of ``torch.frexp`` of magnitudes to `out`, except those of NaN and infinities."""
    torch.bitwise_and(sizes.view(torch.int64), FRACTION, out=out.view(torch.int64)).bitwise_or_(HALF)
    small = sizes < TINY
    if not (count := int(small.count_nonzero())):
        return
    if count == int((sizes == 0).count_nonzero()):
        out.masked_fill_(small, 0.0)
    else:
        out.copy_(torch.frexp(own.abs())[0])


def _uniform(mantissas: Tensor, factor: float, out: Tensor) -> Tensor:
    """Writes uniform numbers in [-1, 1) to `out`, from `accelcheck.workloads.draw.by_value` of mantissas."""
    return torch.mul(mantissas, factor, out=out).frac_().mul_(2).sub_(1)
