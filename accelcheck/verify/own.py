"""Views that compare an error with those of correct results at the same place: in small rows, columns and elements.

The views of `accelcheck.verify.views` measure by the size of a whole tensor: a channel 1/512 as large as the others may
be anything in bfloat16, and nine of the 1,024 probabilities of a row may be hundreds of times too large. In rounding
samples, small numbers have small errors. With e the error, s^2 its mean square over the samples at the same place:

======= ==========================================================================================
channel max over rows and columns i of at least 8 elements of |e_i| / |s_i|
faint   value of |e| / s that 8 elements exceed; the samples are held to the value that 2 of theirs exceed
======= ==========================================================================================

Small samples give a poor s, so s^2 is shrunk to what the tensor's relative error gives there, weighted as `PRIOR`
samples. It is at least the square of `ABSOLUTE` unit roundoffs of the accumulator times the tensor's root mean square:
a correct GELU, whose 1 + erf(x) cancels, errs by so much where its result is nearly 0. Each sample is read against the
others; the budget is `SLACK` times the largest, as in all views. Where a rounding decides at random that an element is
there, one of N samples and a result may differ in the number of such elements. The ranks 2 and 8 are so far apart that
a correct result exceeds 8, where 7 samples have at most one, with a probability below 1e-5 (Poisson, at the worst of
all rates), and then gets a closer look.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from accelcheck.verify.precision import ACCUMULATOR, SLACK, UNIT_ROUNDOFF

OWN = ("channel", "faint")
LEAST = 8
"""Least elements of a channel: the mean square of fewer varies too much."""
FAINT, SAMPLES_FAINT = 8, 2
"""Rank of the element that `faint` reads, in a result and in a sample."""
SPARSE = 64
"""Least elements of a tensor for `faint`."""
PRIOR = 2.0
"""Weight of the whole tensor's relative error, in samples."""
PEERS = 4
"""Least samples: each is held against three others."""
ABSOLUTE = 4.0
"""Least allowed error of an element, in unit roundoffs of the accumulator times the tensor's root mean square."""
LARGEST = 2**12
"""Most rows or columns that are read: the errors of all samples are kept until the last is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Errors:
    """Norms of errors by row, by column (None beyond `LARGEST` of them), and of the ULP views' elements, FP32.

    Norms, not squares: FP32 has no squares of subnormal numbers.
    """

    rows: Any
    columns: Any
    elements: Any

    @classmethod
    def of(cls, rows: Any, columns: Any, elements: Any) -> Self:
        """Errors from sums of squares, and from errors of elements, as NumPy arrays."""
        with np.errstate(all="ignore"):  # infinities and NaN have views of their own
            by_row, by_column = (None if len(sums) > LARGEST else _narrow(np.sqrt(sums)) for sums in (rows, columns))
            return cls(by_row, by_column, _narrow(np.abs(elements)))

    def places(self) -> tuple[Any, Any, Any]:
        """Norms in the order of `Noise`."""
        return self.rows, self.columns, self.elements


def _narrow(norms: Any) -> Any:
    """Norms in FP32, capped at its maximum: an infinite one would make a quotient NaN."""
    return np.minimum(norms, np.finfo(np.float32).max).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Root mean squares of the samples' errors, FP64, in the order of `Errors`, and the budgets of `OWN`."""

    rows: Any
    columns: Any
    elements: Any
    budgets: tuple[float, float] = (math.inf, math.inf)

    def plain(self) -> tuple[Any, ...]:
        """Types that `torch.load` accepts with ``weights_only``."""
        arrays = (self.rows, self.columns, self.elements)
        return (*(None if array is None else torch.from_numpy(array) for array in arrays), self.budgets)

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Self:
        """Inverse of `plain`."""
        *arrays, (channel, faint) = plain
        rows, columns, elements = (None if array is None else array.numpy() for array in arrays)
        return cls(rows, columns, elements, (channel, faint))

    def read(self, errors: Errors, rank: int = FAINT) -> dict[str, float]:
        """Both views of a result, or of a sample with its own rank."""
        channels = [
            float((norms / noise).max())
            for norms, noise in ((errors.rows, self.rows), (errors.columns, self.columns))
            if noise is not None
        ]
        faint = 0.0
        if self.elements is not None:
            faint = float(np.partition(errors.elements / self.elements, -rank)[-rank])
        return {"channel": max(channels, default=0.0), "faint": faint}


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Norms of the oracle's tensor, its sum of squares, and the lengths of a row, a column and the ULP sample."""

    norms: Errors
    total: float
    counts: tuple[int, int, int]


def noise(samples: Sequence[Errors], sizes: Sizes, unit: float, spacing: float) -> Noise | None:
    """Errors that correct results (runs with rounding errors) show; None where samples are few or the tensor is small.

    `unit` is the unit roundoff of the arithmetic precision, and `spacing` the distance of its numbers around 0.
    """
    across, down, count = sizes.counts
    looked = (across >= LEAST and down > 1, down >= LEAST and across > 1, count >= SPARSE)
    if len(samples) < PEERS or sizes.total <= 0.0 or not any(looked):
        return None
    accumulated = ABSOLUTE * min(unit, UNIT_ROUNDOFF[ACCUMULATOR])
    least = accumulated**2 * sizes.total / (across * down) + (spacing / 2) ** 2
    squares = [_squared(sample) for sample in samples]
    own = _squared(sizes.norms)
    usable = [seen and norms is not None for seen, norms in zip(looked, own, strict=True)]
    totals = [np.sum([norms[place] for norms in squares], axis=0) if usable[place] else None for place in range(3)]
    floors = (across * least, down * least, least)
    relative = max(float(norms[2].sum()) for norms in squares) / max(float(own[2].sum()), least)

    def pooled(leaving: tuple[Any, ...] | None) -> Noise:
        count = len(samples) - (leaving is not None)

        def at(place: int) -> Any:
            if totals[place] is None:
                return None
            rest = totals[place] if leaving is None else np.maximum(totals[place] - leaving[place], 0.0)
            return np.sqrt((rest + PRIOR * relative * own[place]) / (count + PRIOR) + floors[place])

        return Noise(at(0), at(1), at(2))

    readings = [pooled(squared).read(sample, SAMPLES_FAINT) for sample, squared in zip(samples, squares, strict=True)]
    whole = pooled(None)
    channel, faint = (SLACK * max(1.0, *(reading[view] for reading in readings)) for view in OWN)
    return replace(whole, budgets=(channel, faint))


def _squared(errors: Errors) -> tuple[Any, ...]:
    return tuple(None if norms is None else norms.astype(np.float64) ** 2 for norms in errors.places())


def figures(errors: Errors, found: Noise) -> Mapping[str, tuple[float, float]]:
    """Measured and allowed error by view."""
    measured = found.read(errors)
    return {view: (measured[view], budget) for view, budget in zip(OWN, found.budgets, strict=True)}
