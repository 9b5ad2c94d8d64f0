"""Which of two environments is faster: processes of both in turns, and an interval from how those of a pair differ.

A process lands in memory where it lands, so processes are the sample; two that take turns share what the machine does meanwhile,
so they make a pair. The interval of the mean log ratio of pairs is Student's t, with its error divided among
looks, sides and cases, so that a run as a whole errs rarely. For so small an error, signed ranks and order statistics have no
interval of fewer than 10 pairs, and for 5 cases of fewer than 13.

Simulated, 4000 duets of 5 cases a cell, spreads of 0.4, 1.0 and 1.5 % between processes: 5 % slower is found in 100, 100 and
100 % after 6, 11 and 16 pairs on average; no false alarm; `same` is said of what is the same in 100, 100 and 83 %. Signed ranks
find as much after 13, 15 and 19 pairs. Where besides one process in ten is slower by four such spreads on average, Student's t
finds 100, 94 and 69 %, they find 100, 98 and 89 %, and both leave the rest undecided: what `latency` is for.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.measure.paired import SpeedVerdict, judged

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOKS = (5, 8, 13, 21, 34)
"""Pairs of processes after which the answer is looked for."""
ERROR = 0.01
"""Probability that in a run an interval of any case, at any look, misses the true ratio."""
MARGIN = 0.02
"""What makes a difference: smaller ones are `same`. Between nothing and the 5 % that must be found."""


@dataclass(frozen=True, slots=True)
class Duet:
    """What came of the pairs of one case.

    Attributes:
        answer: Of the second environment against the first.
        ratio: Its time as a part of the first's: the geometric mean over pairs.
        low, high: Interval of the ratio.
        pairs: How many were measured.
    """

    answer: SpeedVerdict
    ratio: float
    low: float
    high: float
    pairs: int


def latency(times: Sequence[float]) -> float:
    """What a process makes of the times of its blocks, two or more: their tenth percentile.

    Other work only ever makes a block slower, and may do so to most blocks of one process and to none of the next. Measured
    beside five busy processes on two cores, processes spread by 2 to 21 % in their medians and by 1 to 3 % in this.
    """
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def order(pair: int) -> tuple[int, int]:
    """Which side of a pair runs first: A B B A ..., so that neither has the better place."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


def judge(ratios: Sequence[float], cases: int, looks: int = len(LOOKS), margin: float = MARGIN) -> Duet:
    """The answer after so many pairs.

    Args:
        ratios: Of the second environment's time to the first's, one a pair; two at least.
        cases: How many are compared in this run: they share the error.
        looks: How often each of them may be looked at: so do these.
        margin: Relative difference from which on it is faster or slower.

    Raises:
        ValueError: Too few ratios, or one is not positive and finite; no case, no look; a margin not between 0 and 1.
    """
    if len(ratios) < 2 or not all(0.0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"expected two or more positive ratios, got {list(ratios)}")
    if cases < 1 or looks < 1 or not 0.0 < margin < 1.0:
        raise ValueError(
            f"expected a case, a look and a margin between 0 and 1, got {cases} cases, {looks} looks and {margin}"
        )
    from scipy.special import stdtrit  # the command's start-up does not wait for SciPy

    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    scale = statistics.stdev(logs) / math.sqrt(len(logs))
    half = scale * float(stdtrit(len(logs) - 1, 1 - ERROR / (2 * cases * looks)))
    low, high = mean - half, mean + half
    return Duet(judged(low, high, margin), math.exp(mean), math.exp(low), math.exp(high), len(logs))
