"""Whether a ratio has got worse since it was stored: means over processes, and a limit from how processes differ.

A process lands in memory where it lands, and stays there: its ratio is steady, another process's differs. So processes are
the sample, not calls. Log ratios of processes are taken to be normal; the limit is that of Student's t with the spreads of
both samples pooled, its error divided among all cases of a run (Bonferroni), so that a run as a whole errs rarely.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

STORED = 10
"""Processes behind a baseline."""
CHECKED = 3
"""Processes behind a check; what they name is judged by `STORED` further ones."""
ERROR = 0.01
"""Probability of one or more false alarms in a run in which nothing has changed."""
MISSED = 0.01
"""Probability that a check misses a change of the smallest detectable size. The further processes that it asks may miss it too: what
is stated as found in 95 of 100 runs has room for both."""
LEAST_SPREAD = 0.004
"""Smallest standard deviation of log ratios that is believed, because ten processes may agree by chance: the least that
`benchmarks/speed_gates.py` measured between processes of torch (0.4 to 1.5 % on two cores)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Log ratios, one a process.

    Attributes:
        mean: Of the natural logarithms of the times' ratio, candidate to eager.
        spread: Their standard deviation.
        count: Number of processes.
    """

    mean: float
    spread: float
    count: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Sample:
        """The sample of ratios, at least two.

        Raises:
            ValueError: Fewer, or one is not positive and finite.
        """
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
    """A check held against a baseline; all are factors of the time, 1.02 being 2 % slower.

    Attributes:
        factor: By how much the ratio has changed.
        limit: From which factor on it is a regression.
        smallest: The smallest slowdown that such a check finds in 95 of 100 runs.
    """

    factor: float
    limit: float
    smallest: float

    @property
    def regression(self) -> bool:
        """Whether it has got slower."""
        return self.factor > self.limit


def change(stored: Sample, checked: Sample, cases: int) -> Change:
    """Hold a check against a baseline.

    Args:
        stored: The baseline's.
        checked: Measured now.
        cases: How many are held against baselines in this run: they share the error.

    Raises:
        ValueError: There is no case, or a sample of fewer than two processes.
    """
    if cases < 1 or min(stored.count, checked.count) < 2:
        raise ValueError(f"expected a case and samples of two or more, got {cases} cases, {stored} and {checked}")
    from scipy.special import stdtrit  # pytest's start-up does not wait for SciPy

    freedom = stored.count + checked.count - 2
    pooled = (stored.count - 1) * stored.spread**2 + (checked.count - 1) * checked.spread**2
    spread = max(math.sqrt(pooled / freedom), LEAST_SPREAD)
    scale = spread * math.sqrt(1 / stored.count + 1 / checked.count)
    limit = scale * float(stdtrit(freedom, 1 - ERROR / cases))
    found = limit + scale * float(stdtrit(freedom, 1 - MISSED))
    return Change(math.exp(checked.mean - stored.mean), math.exp(limit), math.exp(found))
