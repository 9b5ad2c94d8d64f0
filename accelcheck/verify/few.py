"""Budgets from small samples: what few samples cannot show is granted, so that a correct result passes.

The error of a whole tensor, a norm of many, hardly varies between samples: more than twice the largest of two is a
fault. Two kinds of readings vary more, as 61 to 200 samples of small networks show (MLP, vision transformer and
ResNet, forward and training):

- Single numbers: a gain, whatever the tensor's size, and all views of tensors with a few elements, such as losses. A
  correct one exceeds twice the largest of two samples in one case of three. They are held to Student's t of the
  samples' root mean square.
- Tensors of a pass in which a rounding decides something, such as whether a ReLU passes a gradient. A sample with
  another decision may err a thousand times more, and the next result may do so in a tensor where no sample did. Each
  tensor is granted the largest ratio of two samples of one tensor, over all tensors.

With closer looks at 8 and 24 samples no verdict of 14,000 drawn from those samples was wrong without such decisions,
and 1 in 200 was of a ResNet's training in which every sixth sample had one.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from scipy.special import stdtrit

from accelcheck.verify.precision import ACCUMULATOR, SLACK, UNIT_ROUNDOFF
from accelcheck.verify.views import VIEWS, Reading
from accelcheck.workloads.base import Result

UNITS: Mapping[str, float] = MappingProxyType({"row": 512.0, "column": 1024.0, "block": 512.0, "element": 1024.0})
"""Caps in unit roundoffs; a column of a vector is one element. The condition of a workload magnifies rounding errors:
built-in ones show 50 to 150 units for attention and layer norm, 400 for gradients behind several batch norms."""
ACCUMULATED = 4.0
"""Factor of the caps in the accumulator's own precision, where a sum adds the square root of its length."""
SHARES: Mapping[str, float] = MappingProxyType({"row": 0.65, "block": 0.65, "gain": 0.3})
"""Precision-independent caps. A result of zeros is 0.71 in its worst row and block, and has a gain of -1."""
SHORT = 16
"""Least elements of a row with a capped share: fewer (a kernel has three) are small by chance, and blocks hold them."""
FEWEST = 2
"""Least elements of a tensor with caps: a single number is small by chance in one draw of four, but not in all."""


def cap(view: str, unit: float, shape: Sequence[int]) -> float:
    """Largest budget of a view that decides anything; infinite for views without a cap and for single numbers."""
    if math.prod(shape) < FEWEST:
        return math.inf
    wider = ACCUMULATED if unit <= UNIT_ROUNDOFF[ACCUMULATOR] else 1.0
    return min(UNITS.get(view, math.inf) * wider * unit, share(view, shape))


def share(view: str, shape: Sequence[int]) -> float:
    """Precision-independent cap of a view; a result of zeros exceeds it."""
    if math.prod(shape) < FEWEST or (view == "row" and shape[-1] < SHORT):
        return math.inf
    return SHARES.get(view, math.inf)


def beyond(budgets: Mapping[str, float], unit: float, shape: Sequence[int]) -> str:
    """Describes the first budget of a tensor that is beyond its cap; empty where none is."""
    for view, budget in budgets.items():
        limit = cap(view, unit, shape)
        if budget > limit:
            return (
                f"the budget of view {view} is {budget:.3g}, {budget / unit:.3g} unit roundoffs; the cap is "
                f"{limit:.3g}: rounding errors alone decide this tensor, and any fault would pass. Change the "
                "workload: keep what a ReLU, a maximum or a comparison decides away from its threshold, and sums from "
                "cancelling (accelcheck/workloads/draw.py and cnn.py show how), or give it fewer layers"
            )
    return ""


ERROR = 1e-4
"""Probability that a single number of a correct result is beyond its quantile, in one look."""
RARE = 1e-9
"""The same probability in the last look, where samples are many: a run judges thousands of numbers."""
RARE_TOGETHER = 5e-8
"""The same for a mean over all draws: a case has a few of them, whose signs agree by chance in 1 of 8 cases."""
FEW = 16
"""Elements of a tensor below which all its views count as single numbers."""
CALM = 4.0
"""Largest ratio of two samples' errors of one tensor where no decision differs; among ten samples 2.3 in the median."""
_NORMS = ("row", "column", "block", "element")


def quantile(sizes: Sequence[float], error: float = ERROR) -> float:
    """Size that one more number exceeds with a probability: Student's t of the root mean square of `sizes`, mean 0."""
    root_mean_square = math.sqrt(sum(size**2 for size in sizes) / len(sizes))
    return float(stdtrit(len(sizes), 1 - error / 2)) * root_mean_square


def single(view: str, shape: Sequence[int]) -> bool:
    """True for a view that is a single number, which varies more than a norm of many elements."""
    return view == "gain" or math.prod(shape) < FEW


def spread(readings: Mapping[str, Sequence[Reading]], truth: Result) -> float:
    """Largest ratio of two samples' errors of one tensor, over tensors of at least `FEW` elements and their norms."""
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
    """Budgets by path and view, none smaller than those from the samples alone.

    `ratio` is the `spread` of the samples, and of eager where it is one more.
    """
    wider = {path: dict(views) for path, views in budgets.items()}
    for path, view in itertools.product(wider, VIEWS):
        sizes, shape = [abs(sample[view]) for sample in readings[path]], truth[path].shape
        granted = quantile(sizes) if single(view, shape) else 0.0
        if ratio > CALM and view != "bias":
            granted = max(granted, SLACK * ratio * min(sizes))
        # A grant beyond what samples show must not let a whole tensor of zeros pass.
        limit = cap(view, unit, shape) if ratio <= CALM else share(view, shape)
        wider[path][view] = max(wider[path][view], min(granted, limit))
    return wider
