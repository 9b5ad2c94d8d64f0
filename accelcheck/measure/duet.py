"""Comparison of two environments: processes of both take turns, and an interval follows from the ratios within pairs.

Each process has its own memory layout, so the sample is processes. Two processes that take turns see the same
disturbances, so they form a pair. The interval of the mean log ratio is Student's t, its error divided among looks,
sides and cases, so that a whole run errs rarely. With so small an error, signed ranks and order statistics have no
interval below 10 pairs, and for 5 cases none below 13.

In a simulation of 4000 duets of 5 cases, with spreads of 0.4, 1.0 and 1.5 % between processes, a slowdown of 5 % is
found in 100, 100 and 100 % after 6, 11 and 16 pairs on average, without a false alarm; equal environments are called
`same` in 100, 100 and 83 %. Signed ranks find as much after 13, 15 and 19 pairs. If one process in ten is slower by
four such spreads on average, Student's t finds 100, 94 and 69 %, signed ranks 100, 98 and 89 %, and both leave the rest
undecided. `latency` avoids such outliers.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from accelcheck.measure.paired import SpeedVerdict, judged
from accelcheck.measure.regression import Sample

LOOKS = (5, 8, 13, 21, 34)
"""Numbers of pairs of processes after which the interval is computed."""
ERROR = 0.01
"""Probability that any interval of a run, of any case at any look, misses the true ratio."""
MARGIN = 0.02
"""Smallest relative difference that counts; smaller ones are `same`. The 5 % that must be found are more."""


@dataclass(frozen=True, slots=True)
class Duet:
    """The result of the pairs of a case: the second's time divided by the first's, as geometric mean, with interval."""

    answer: SpeedVerdict
    ratio: float
    low: float
    high: float
    pairs: int


def latency(times: Sequence[float]) -> float:
    """The latency of a process from the times of its blocks, at least two: their tenth percentile.

    Other work can only slow a block down, and may slow most blocks of one process and none of the next. Beside five
    busy processes on two cores, the medians of processes spread by 2 to 21 %, the tenth percentiles by 1 to 3 %.
    """
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def order(pair: int) -> tuple[int, int]:
    """Order of the two sides in a pair: A B B A ..., so that neither side always comes first."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


def judge(ratios: Sequence[float], cases: int, looks: int = len(LOOKS), margin: float = MARGIN) -> Duet:
    """The result after these pairs, from the second environment's time divided by the first's; at least two.

    All cases that this run compares, and all looks at each, share the error. A `ValueError` for too few ratios, one
    that is not positive and finite, no case, no look, or a margin not between 0 and 1.
    """
    sample = Sample.of(ratios)
    if cases < 1 or looks < 1 or not 0.0 < margin < 1.0:
        got = f"{cases} cases, {looks} looks and {margin}"
        raise ValueError(f"expected a case, a look and a margin between 0 and 1, got {got}")
    from scipy.special import stdtrit  # the command's start-up does not wait for SciPy

    scale = sample.spread / math.sqrt(sample.count)
    half = scale * float(stdtrit(sample.count - 1, 1 - ERROR / (2 * cases * looks)))
    low, high = sample.mean - half, sample.mean + half
    return Duet(judged(low, high, margin), sample.factor, math.exp(low), math.exp(high), sample.count)
