"""Budgets from few rounding samples: what the samples at hand cannot know is granted, so that a correct result does not fail.

The error of a whole tensor hardly varies between samples, since it is the norm of many; what exceeds twice the largest of two is a fault. Two kinds
of readings vary more, as 61 to 200 samples of small networks show (MLP, vision transformer and ResNet, forward and training):

- Those of few numbers: a gain, whatever the tensor's size, and all views of tensors with a few elements, such as losses. A correct one
  exceeds twice the largest of two samples in one case of three. They are held to Student's t of the samples' root mean square.
- Those of a model in whose pass a rounding decides something, such as whether a ReLU passes a gradient: where that happens in one sample and not
  in another, the error of a tensor may be a thousand times larger, and the next result may have it in a tensor where no sample did. The largest ratio
  of two samples of the same tensor, over all tensors, is granted to each.

With closer looks at 8 and 24 samples no verdict of 14,000 drawn from those samples was wrong without such decisions, 1 in 200 of a ResNet's training of which
every sixth sample had one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from scipy import stats

from accelcheck.verify import caps
from accelcheck.verify.precision import SLACK
from accelcheck.verify.views import VIEWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelcheck.verify.views import Reading
    from accelcheck.workloads.base import Result

ERROR = 1e-4
"""Probability that a single number of a correct result is beyond its quantile, in one look."""
FEW = 16
"""Elements of a tensor below which all its views count as single numbers."""
CALM = 4.0
"""Ratio of two samples' errors of one tensor up to which no decision differs: without, 2.3 was the largest of ten in the median case."""
_NORMS = ("row", "column", "block", "element")


def spread(readings: Mapping[str, Sequence[Reading]], truth: Result) -> float:
    """The largest ratio of two samples' errors of a tensor, over all tensors with `FEW` elements and more, and their norms."""
    ratios = [1.0]
    for path, samples in readings.items():
        if truth[path].numel() >= FEW:
            for view in _NORMS:
                sizes = [abs(sample[view]) for sample in samples]
                if min(sizes) > 0.0 and max(sizes) < math.inf:
                    ratios.append(max(sizes) / min(sizes))
    return max(ratios)


def widened(
    budgets: Mapping[str, Mapping[str, float]],
    readings: Mapping[str, Sequence[Reading]],
    truth: Result,
    unit: float,
    ratio: float,
) -> dict[str, dict[str, float]]:
    """Budgets by path and view, none smaller than given.

    Args:
        budgets: From the samples alone.
        readings: Of the samples, by path.
        truth: The oracle's result.
        unit: Unit roundoff of the arithmetic precision.
        ratio: `spread` of the samples, and of eager where it is one more.
    """
    return {
        path: _widened(views, readings[path], tuple(truth[path].shape), unit, ratio) for path, views in budgets.items()
    }


def _widened(
    budgets: Mapping[str, float], samples: Sequence[Reading], shape: tuple[int, ...], unit: float, ratio: float
) -> dict[str, float]:
    single = math.prod(shape) < FEW
    quantile = float(stats.t.ppf(1 - ERROR / 2, len(samples)))
    found = dict(budgets)
    for view in VIEWS:
        sizes = [abs(sample[view]) for sample in samples]
        granted = 0.0
        if single or view == "gain":
            granted = quantile * math.sqrt(sum(size**2 for size in sizes) / len(sizes))
        if ratio > CALM and view != "bias":
            granted = max(granted, SLACK * ratio * min(sizes))
        # What is granted without being seen never lets a whole tensor of zeros pass.
        limit = caps.cap(view, unit, shape) if ratio <= CALM else caps.share(view, shape)
        found[view] = max(found[view], min(granted, limit))
    return found
