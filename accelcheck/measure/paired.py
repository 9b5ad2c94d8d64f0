"""Which of two is faster: both measured in turns in one process, and an interval that assumes nothing of how times spread.

Nothing read from an earlier process comes near: each process lands differently in memory. Times of a pair share what the machine
does at that moment, so their ratio is steady where neither of them is.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from accelcheck.measure.contention import waited

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOKS = (0.25, 0.5, 1.0, 2.0)
"""Seconds of measuring after which the answer is looked for: most are found at the first look."""
ERROR = 0.0025
"""Probability, at each look and on each side, that the interval misses the true median: 4 looks, two sides, 2 % in all. A wrong
answer needs more than that: an interval that misses the truth by the whole margin."""
MARGIN = 0.015
"""What makes a difference: smaller ones are `same`."""


class SpeedVerdict(StrEnum):
    """Of the candidate, against what it is compared with."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Attributes:
        answer: Against the margin.
        ratio: The candidate's time as a part of the other's: the median over pairs.
        low, high: Interval of the ratio, with the error on each side that was asked for.
        pairs: How many were measured.
        seconds: How long that took.
        base, candidate: Times of the blocks, in seconds, in the order in which they were measured.
        waited: Seconds that threads of this process waited for a core meanwhile, as a part of `seconds`: above 1 where many did.
            Work beside it, or its other threads, had them; that slows the two down alike only as far as they use cores alike.
            None: not known.
    """

    answer: SpeedVerdict
    ratio: float
    low: float
    high: float
    pairs: int
    seconds: float
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    waited: float | None = None


def compare(
    base: Callable[[], float],
    candidate: Callable[[], float],
    margin: float = MARGIN,
    looks: Sequence[float] = LOOKS,
    now: Callable[[], float] = time.perf_counter,
    error: float = ERROR,
) -> Comparison:
    """Measure both in turns, in the order A B B A, until the interval lies on one side of a margin or the last look is over.

    Args:
        base: Runs a block of what is compared with, and gives its time in seconds.
        candidate: The same of the candidate.
        margin: Relative difference from which on it is faster or slower.
        looks: Seconds after which to look, ascending.
        now: Clock that the looks go by.
        error: Probability that the interval misses the true median, at each look and on each side. It says how many pairs there
            are at least.

    Raises:
        ClockError: As `base` and `candidate` raise it.
        ValueError: The margin is not between 0 and 1, or there are no looks.
    """
    if not 0.0 < margin < 1.0 or not looks:
        raise ValueError(f"expected a margin between 0 and 1 and at least one look, got {margin} and {list(looks)}")
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    importlib.import_module("scipy.special")  # now, not between blocks that are timed
    before = waited()
    start = now()
    for look in looks:
        # However slow a block is: below so many pairs there is no interval.
        while now() - start < look or len(logs) < fewest(error):
            # The second of a pair may find caches warm, or the machine slower: each is second as often.
            order = (0, 1) if len(logs) % 2 == 0 else (1, 0)
            pair = [0.0, 0.0]
            for which in order:
                pair[which] = (base, candidate)[which]()
                times[which].append(pair[which])
            logs.append(math.log(pair[1] / pair[0]))
        low, high = interval(logs, error)
        answer = judged(low, high, margin)
        if answer is not SpeedVerdict.UNDECIDED:
            break
    seconds, after = now() - start, waited()
    return Comparison(
        answer,
        math.exp(statistics.median(logs)),
        math.exp(low),
        math.exp(high),
        len(logs),
        seconds,
        tuple(times[0]),
        tuple(times[1]),
        None if before is None or after is None or seconds <= 0 else max(0.0, after - before) / seconds,
    )


def judged(low: float, high: float, margin: float) -> SpeedVerdict:
    """The answer of an interval of log ratios."""
    limit = math.log1p(margin)
    if low > limit:
        return SpeedVerdict.SLOWER
    if high < -limit:
        return SpeedVerdict.FASTER
    if -limit <= low and high <= limit:
        return SpeedVerdict.SAME
    return SpeedVerdict.UNDECIDED


def interval(values: Sequence[float], error: float) -> tuple[float, float]:
    """Interval of the median from order statistics: exact for every continuous distribution.

    The k-th smallest value is above the true median only if at most k - 1 values are below: Binomial(n, 1/2).

    Args:
        values: At least `fewest(error)` of them.
        error: Probability of missing the median, on each side.

    Raises:
        ValueError: Too few values.
    """
    import numpy as np
    from scipy.special import bdtr

    count = len(values)
    # The largest k with P(Binomial(count, 1/2) <= k - 1) <= error.
    rank = int(np.searchsorted(bdtr(np.arange(count), count, 0.5), error, side="right"))
    if rank == 0:
        raise ValueError(f"expected at least {fewest(error)} values for an error of {error:g} a side, got {count}")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[-rank]


def fewest(error: float) -> int:
    """Fewest values that have an interval with this error a side: 2**-n must not exceed it."""
    return math.ceil(-math.log2(error))
