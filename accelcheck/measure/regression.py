"""Comparison of a ratio with the stored one: means over processes, and a limit from the spread between processes.

Each process has its own memory layout: its ratio is steady, and differs from that of another process. So the sample is
processes, not calls, and their log ratios are assumed to be normal. The limit is that of Student's t with the pooled
spread of both samples; its error is divided among all cases of a run (Bonferroni), so that a whole run errs rarely.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STORED = 10
"""Number of processes of a baseline."""
CHECKED = 3
"""Number of processes of a check; `STORED` further ones judge the cases that exceed the limit in these."""
ERROR = 0.01
"""Probability of at least one false alarm in a run in which nothing has changed."""
MISSED = 0.01
"""Probability that a check misses a change of the smallest detectable size; with that of the further processes, the
report states 95 of 100 runs."""
LEAST_SPREAD = 0.004
"""Least assumed standard deviation of log ratios, since ten processes may agree by chance. Over all sessions of
``baselines/cpu/speed_gates.jsonl`` workloads have 0.5 to 1.5 % (root mean square), in single ones at least
0.1 %."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Log ratios of times, candidate to eager, one per process: their mean, standard deviation and number."""

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Sample:
        """The sample of two ratios or more; a `ValueError` for fewer, or where one is not positive and finite."""
        if len(ratios) < 2 or not all(0.0 < ratio < math.inf for ratio in ratios):
            raise ValueError(f"expected two or more positive ratios, got {list(ratios)}")
        logs = [math.log(ratio) for ratio in ratios]
        return cls(statistics.fmean(logs), statistics.stdev(logs), len(logs))

    @property
    def factor(self) -> float:
        """The ratio itself: the geometric mean."""
        return math.exp(self.mean)


@dataclass(frozen=True, slots=True)
class Change:
    """The comparison of a check with a baseline. All values are factors of the time: 1.02 is 2 % slower.

    `limit` is the largest that is no regression, and `smallest` the smallest slowdown found in 95 of 100 such checks.
    """

    factor: float
    limit: float
    smallest: float

    @property
    def regression(self) -> bool:
        """True if the case has become slower."""
        return self.factor > self.limit


def change(stored: Sample, checked: Sample, cases: int) -> Change:
    """Compare a check with a baseline; all the cases that a run compares share the error.

    A `ValueError` where there is no case, or a sample of fewer than two processes.
    """
    if cases < 1 or min(stored.count, checked.count) < 2:
        raise ValueError(f"expected a case and samples of two or more, got {cases} cases, {stored} and {checked}")
    from scipy.special import stdtrit  # pytest's start-up does not wait for SciPy

    freedom = stored.count + checked.count - 2
    pooled = (stored.count - 1) * stored.spread**2 + (checked.count - 1) * checked.spread**2
    spread = max(math.sqrt(pooled / freedom), LEAST_SPREAD)
    scale = spread * math.sqrt(1 / stored.count + 1 / checked.count)
    limit = scale * float(stdtrit(freedom, 1 - ERROR / cases))
    smallest = limit + scale * float(stdtrit(freedom, 1 - MISSED))
    return Change(math.exp(checked.mean - stored.mean), math.exp(limit), math.exp(smallest))
