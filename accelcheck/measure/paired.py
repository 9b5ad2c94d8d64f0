"""Comparison of two calls, measured in turns in one process, by an interval that assumes no distribution of times.

Figures of an earlier process are less precise, since each process has another memory layout. Both times of a pair see
the same disturbances, so their ratio is steadier than either.
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

LOOKS = (0.25, 0.5, 1.0, 2.0)
"""Seconds of measuring after which the interval is computed. The first look decides most cases."""
ERROR = 0.0025
"""Probability per look and side that the interval misses the true median: 2 % in all for 4 looks and two sides. A wrong
answer is less likely, since the interval must then miss the truth by the whole margin."""
MARGIN = 0.015
"""Smallest relative difference that counts; smaller ones are `same`."""


class SpeedVerdict(StrEnum):
    """The candidate compared with its base."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        ratio: Candidate's time divided by the base's, the median over pairs.
        low, high: Interval of the ratio, with the given error on each side.
        seconds: Duration of the measurement.
        base, candidate: Times of the blocks, in seconds, in the order of measuring.
        waited: Seconds that threads of this process waited for a core, divided by `seconds`; above 1 if several waited;
            None if the kernel does not tell. Waiting slows both calls equally only if both use cores equally.
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
    """Measure both in turns, A B B A, until the interval lies on one side of a margin or the last look is over.

    `base` and `candidate` run a block and return its time in seconds. `looks` are the seconds after which to compute
    the interval, ascending. `error` is the probability per look and side that the interval misses the true median; it
    sets the least number of pairs. A `ClockError` where a clock stood still or went backwards, and a `ValueError` where
    the margin is not between 0 and 1, or there are no looks.
    """
    if not 0.0 < margin < 1.0 or not looks:
        raise ValueError(f"expected a margin between 0 and 1 and at least one look, got {margin} and {list(looks)}")
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    importlib.import_module("scipy.special")  # now, not between blocks that are timed
    before = waited()
    start = now()
    for look in looks:
        # However slow a block is: with fewer pairs there is no interval.
        while now() - start < look or len(logs) < fewest(error):
            # The second of a pair may find caches warm, or the machine slower, so each is second equally often.
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
    """The verdict of an interval of log ratios."""
    limit = math.log1p(margin)
    if low > limit:
        return SpeedVerdict.SLOWER
    if high < -limit:
        return SpeedVerdict.FASTER
    if -limit <= low and high <= limit:
        return SpeedVerdict.SAME
    return SpeedVerdict.UNDECIDED


def interval(values: Sequence[float], error: float) -> tuple[float, float]:
    """Interval of the median from order statistics, exact for every continuous distribution.

    The k-th smallest value is above the true median if at most k - 1 values are below it, which has the probability
    P(Binomial(n, 1/2) <= k - 1) (W. R. Thompson, Annals of Mathematical Statistics 7, 1936, 122-128). A `ValueError`
    for fewer than `fewest(error)` values, `error` being that of each side.
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
    """Least number of values for an interval with this error on each side: 2**-n must not exceed it."""
    return math.ceil(-math.log2(error))


_TASKS = Path("/proc/self/task")


def waited() -> float | None:
    """Total seconds that the living threads of this process were ready to run and waited for a core.

    None where the kernel does not tell: on systems other than Linux, or without schedstats
    (https://docs.kernel.org/scheduler/sched-stats.html: the second number is nanoseconds spent waiting on a runqueue).
    """
    seconds, told = 0.0, False
    for path in _TASKS.glob("*/schedstat"):
        try:
            seconds += 1e-9 * int(path.read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
        told = True
    return seconds if told else None
