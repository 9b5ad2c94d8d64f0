"""Checks dropout masks: random, of the right rate, drawn anew each time. Pure functions of masks, without torch's RNG.

A mask is a bool tensor, true where an element is kept. A draw less its expectation, ``z = kept - (1 - rate)``, has mean
0, variance ``rate * (1 - rate)`` and magnitude at most ``max(rate, 1 - rate)``. Each function compares a sum of
independent such terms, or of those of a martingale, with a tail bound that holds for every size (`deviation`). So it
calls a correct generator faulty with at most the probability `alarm`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelcheck.core.case import Figure
from accelcheck.verify.precision import SLACK

RESOLUTION = 0.01
"""Error of a rate that a mask must be large enough to show: a percentage point."""
LONGEST = 4096
"""Most slices along a dimension that are compared pairwise: the memory of more pairs exceeds 128 MiB."""
SCALE_ROUNDINGS = 3
"""Roundings of ``x * (1 / (1 - rate))``: of the probability, its reciprocal and the product, each to the precision."""
CLEAR = 2.0**-6
"""Least value without dropout that shows a mask, as a part of the root mean square: 98.8 % of the elements of a normal
gradient exceed it. A smaller value may round to 0 in a half type."""


@dataclass(frozen=True)
class Mask:
    """Mask read off a result at a place of a run, such as ``out[1] of the next call``; `kept` is a bool tensor."""

    path: str
    kept: Tensor
    rate: float
    _spectra: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def variance(self) -> float:
        """Variance of one draw."""
        return self.rate * (1.0 - self.rate)

    @property
    def largest(self) -> float:
        """Largest magnitude of a draw less its expectation."""
        return max(self.rate, 1.0 - self.rate)

    def centered(self) -> Tensor:
        """Draws less their expectation, FP64."""
        return self.kept.double() - (1.0 - self.rate)

    def spectrum(self, size: int) -> Tensor:
        """Fourier transform of the row-major order, padded to `size`, and cached for many comparisons."""
        if size not in self._spectra:
            self._spectra[size] = torch.fft.rfft(self.centered().flatten(), n=size)
        return self._spectra[size]


def deviation(alarm: float, variance: float | Tensor, largest: float | Tensor) -> Tensor:
    """Magnitude that a sum of terms of mean 0 exceeds with a probability of at most `alarm`.

    Solves ``alarm = 2 exp(-t**2 / (2 variance + 2 largest t / 3))`` for t. For independent terms this is Bernstein's
    inequality (Boucheron, Lugosi, Massart, Concentration Inequalities, 2013, corollary 2.11); for a martingale, with a
    bound of its predictable variance, Freedman's (On tail probabilities for martingales, 1975, theorem 1.6).
    `variance` is that of the sum, `largest` the magnitude of a term, and `alarm` counts both sides together.
    """
    variances = torch.as_tensor(variance, dtype=torch.float64)
    log = math.log(2.0 / alarm)
    linear = torch.as_tensor(largest, dtype=torch.float64) * (log / 3.0)
    return linear + (linear.square() + 2.0 * log * variances).sqrt()


def rate(mask: Mask, alarm: float) -> Figure:
    """Distance of the part of dropped elements from the rate.

    Raises:
        ValueError: The mask is too small to tell a rate that is off by `RESOLUTION`.
    """
    count = mask.kept.numel()
    allowed = float(deviation(alarm, count * mask.variance, mask.largest)) / count if count else math.inf
    if allowed > RESOLUTION:
        raise ValueError(
            f"{mask.path}: {count} draws tell a rate of {mask.rate:g} only to within {allowed:.2g}, "
            f"and {RESOLUTION:g} is needed: give the workload larger inputs"
        )
    measured = abs(float(mask.centered().sum())) / count
    return Figure(mask.path, "rate", measured, allowed, "", gates=True)


def slice_rates(mask: Mask, alarm: float) -> Figure:
    """Rate of each slice along each dimension: finds a tail that is never dropped, a head that always is.

    For n draws, a part f of them dropped, it is n times the Kullback-Leibler divergence of f from the rate, in nats. It
    exceeds ``log(2 / alarm)`` with a probability of at most `alarm` (Hoeffding, Probability inequalities for sums of
    bounded random variables, 1963, theorem 1): for few draws, this tells more than the variance does.
    """
    means = [_slices(mask.kept, axis).double().mean(dim=1) for axis in range(mask.kept.dim())]
    allowed = math.log(2.0 * sum(len(kept) for kept in means) / alarm)
    worst = (0.0, "")
    for axis, kept in enumerate(means):
        share = 1.0 - kept
        divergence = share.xlogy(share / mask.rate) + kept.xlogy(kept / (1.0 - mask.rate))
        index = int(divergence.argmax())
        size = mask.kept.numel() // len(kept)
        worst = max(worst, (size * float(divergence[index]), _place(mask, axis, index)))
    return Figure(mask.path, "slice rate", worst[0], allowed, worst[1], gates=True)


def lags(mask: Mask, alarm: float) -> Figure:
    """Correlation of the mask with itself, at every lag of its row-major order at once (by FFT).

    Neighbours along every axis, every stride between them, and every period of the generator are such lags. The
    products ``z[i] z[i - lag]`` are a martingale's steps, of predictable variance ``variance * z[i - lag]**2``. Its sum
    is bounded by the sum of squares at the largest deviation of the rate that `rate` allows with the same `alarm`:
    beyond it, `rate` gives the alarm.
    """
    count = mask.kept.numel()
    products = _correlate(mask, mask)[1:count].abs()
    if not len(products):
        return Figure(mask.path, "lag", 0.0, 1.0, "", gates=True)
    extra = abs(1.0 - 2.0 * mask.rate) * float(deviation(alarm, count * mask.variance, mask.largest))
    variance = mask.variance * (count * mask.variance + extra)
    allowed = float(deviation(alarm / len(products), variance, mask.largest**2))
    lag = int(products.argmax())
    scale = count * mask.variance
    return Figure(mask.path, "lag", float(products[lag]) / scale, allowed / scale, f"lag {lag + 1}", gates=True)


def slices(mask: Mask, alarm: float) -> Figure:
    """Correlation of any two slices along each dimension: finds one mask used for two rows, however far apart."""
    axes = [axis for axis, size in enumerate(mask.kept.shape) if 1 < size <= LONGEST and mask.kept.numel() > size]
    pairs = sum(mask.kept.shape[axis] * (mask.kept.shape[axis] - 1) // 2 for axis in axes)
    worst = (0.0, 1.0, "")
    for axis in axes:
        z = _slices(mask.centered(), axis)
        products = (z @ z.T).abs().triu(diagonal=1)
        # Given the first of the two, the terms are independent.
        variances = mask.variance * z.square().sum(dim=1, keepdim=True)
        allowed = deviation(alarm / pairs, variances, mask.largest * z.abs().amax(dim=1, keepdim=True))
        first, second = divmod(int((products / allowed).argmax()), len(z))
        scale = z.shape[1] * mask.variance
        pair = (
            float(products[first, second]) / scale,
            float(allowed[first]) / scale,
            f"{_place(mask, axis, first)} and {_place(mask, axis, second)}",
        )
        worst = max(worst, pair, key=lambda pair: pair[0] / pair[1])
    return Figure(mask.path, "slices", *worst, gates=True)


def likeness(one: Mask, other: Mask, alarm: float) -> Figure:
    """Correlation of two masks at every shift of their row-major orders: of layers, calls, or seeds.

    A generator that advances by less than a call draws gives a shifted mask, not the same.
    """
    sizes = one.kept.numel(), other.kept.numel()
    products = _correlate(one, other)
    # Shifts 0, 1, ... up to the end of the first mask, then the negative ones, counted from the back.
    shifts = torch.cat([products[: sizes[0]], products[len(products) - sizes[1] + 1 :]]).abs()
    # Given the first mask, the terms are independent.
    variance = other.variance * float(one.centered().square().sum())
    allowed = float(deviation(alarm / len(shifts), variance, one.largest * other.largest))
    index = int(shifts.argmax())
    shift = index if index < sizes[0] else index - len(shifts)
    scale = min(sizes) * math.sqrt(one.variance * other.variance)
    path = f"{one.path} and {other.path}"
    return Figure(path, "likeness", float(shifts[index]) / scale, allowed / scale, f"shift {shift}", gates=True)


def difference(path: str, view: str, one: Tensor, other: Tensor, told: Tensor | None = None) -> Figure:
    """Number of elements that differ, of tensors of one shape; none may. Only those `told` are compared, if given."""
    unlike = (one != other) & ~(one.isnan() & other.isnan())
    if told is not None:
        unlike &= told
    count = int(unlike.sum())
    where = str(unlike.nonzero()[0].tolist()) if count else ""
    return Figure(path, view, float(count), 0.0, where, gates=True)


def clear(truth: Tensor) -> Tensor:
    """Marks elements that show a mask: the value without dropout is not nearly 0."""
    return truth.abs() >= CLEAR * truth.double().square().mean().sqrt()


def errors(value: Tensor, truth: Tensor, told: Tensor) -> tuple[float, str, float]:
    """Largest relative error where `told`, its index, and the error of the least-squares gain."""
    if not bool(told.any()):
        return 0.0, "", 0.0
    got, expected = value.double(), truth.double()
    relative = torch.where(told, got / expected - 1.0, 0.0).abs()
    index = int(relative.flatten().argmax())  # NaN counts as the largest
    where = [int(i) for i in torch.unravel_index(torch.tensor(index), relative.shape)]
    gain = float((got * expected)[told].sum() / expected[told].square().sum())
    return float(relative.flatten()[index]), str(where), abs(gain - 1.0)


def rescaling(
    path: str,
    value: Tensor,
    truth: Tensor,
    kept: Tensor,
    dropped: float,
    rounding: tuple[float, str, float],
    unit: float,
) -> Iterator[Figure]:
    """Errors of kept values against those without dropout, divided by the probability of keeping.

    `truth` is FP64, `kept` marks the elements to compare, and `dropped` is the probability of dropping. `rounding` has
    the largest `errors` that rounding explains without dropout, over all clear elements; `unit` is the unit roundoff.
    """
    worst, where, gain = errors(value.double() * (1.0 - dropped), truth, kept)
    rescaled = SCALE_ROUNDINGS * unit
    yield Figure(path, "scale", worst, rescaled + SLACK * rounding[0], where, gates=True)
    yield Figure(path, "scale gain", gain, rescaled + SLACK * rounding[2], "", gates=True)


def unchanged(path: str, value: Tensor, truth: Tensor, rounding: tuple[float, str, float], told: Tensor) -> Figure:
    """Error of values in evaluation mode against those without dropout; 0 is allowed where rounding has no part."""
    worst, where, _ = errors(value, truth, told)
    return Figure(path, "evaluation", worst, SLACK * rounding[0], where, gates=True)


def _slices(values: Tensor, axis: int) -> Tensor:
    """Matrix ``(size of the axis, all others)``."""
    moved = values.movedim(axis, 0)
    return moved.reshape(len(moved), -1)


def _place(mask: Mask, axis: int, index: int) -> str:
    return f"[{', '.join(str(index) if i == axis else ':' for i in range(mask.kept.dim()))}]"


def _correlate(one: Mask, other: Mask) -> Tensor:
    """``sum_i a[i + s] b[i]`` for each shift s, those below 0 at the end; padded, so that nothing wraps around."""
    size = 1 << (one.kept.numel() + other.kept.numel() - 1).bit_length()
    correlation: Tensor = torch.fft.irfft(one.spectrum(size) * other.spectrum(size).conj(), n=size)
    return correlation
