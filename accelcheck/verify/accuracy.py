"""Upper confidence bounds of the task accuracy that a technique costs, from paired comparisons. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.975
"""One-sided confidence of every bound, from ICH E9 (Statistical Principles for Clinical Trials, 1998, 5.5) for trials
of non-inferiority. A technique that costs exactly the limit passes in 1 of 40 trials, one that costs more in fewer."""

_PRECISION = 1e-9
"""Precision of a bound, as a part of all samples: a thousandth of one sample of 10**6."""


class UndecidedError(RuntimeError):
    """Too few samples to decide. The case is an `error`: neither a failure nor a pass."""


@dataclass(frozen=True)
class Pairs:
    """Samples classified twice: those that only the reference has right are lost, only the candidate won."""

    samples: int
    lost: int
    won: int

    @classmethod
    def of(cls, reference: Sequence[bool], candidate: Sequence[bool]) -> Pairs:
        """Counts lost and won samples of two sequences of one length."""
        both = list(zip(reference, candidate, strict=True))
        return cls(len(both), sum(a and not b for a, b in both), sum(b and not a for a, b in both))

    @property
    def drop(self) -> float:
        """Accuracy lost, as a part of all samples; negative where some was won."""
        return (self.lost - self.won) / self.samples

    def enough(self, limit: float) -> int:
        """Least multiple of these samples, alike in losses and wins, whose bound is within a limit above their drop."""

        def decided(times: int) -> bool:
            return upper_bound(Pairs(self.samples * times, self.lost * times, self.won * times)) <= limit

        high = 1
        while not decided(high):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if decided(middle) else (middle, high)
        return self.samples * high


def pooled(groups: Iterable[Pairs]) -> Pairs:
    """All samples of several comparisons."""
    listed = list(groups)
    return Pairs(sum(g.samples for g in listed), sum(g.lost for g in listed), sum(g.won for g in listed))


def upper_bound(pairs: Pairs, confidence: float = CONFIDENCE) -> float:
    """Upper bound of the drop in accuracy, at a one-sided confidence.

    Tango's score interval for the difference of paired proportions: the largest drop that a score test does not reject
    (T. Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17, 1998, 891-908). Unlike Wald's it is right for few discordant pairs, and for none: the
    bound is then z**2 / (n + z**2), Wilson's.

    Raises:
        ValueError: There is no sample.
    """
    if pairs.samples < 1:
        raise ValueError("no sample was compared: there is no bound")
    if pairs.lost == pairs.samples:
        return 1.0
    from scipy.optimize import brentq

    z = NormalDist().inv_cdf(confidence)
    # The score is 0 at the observed drop, falls from there on, and is minus infinity at a drop of 1.
    low = max(pairs.drop, -1.0 + _PRECISION)
    if _score(pairs, low) <= -z:  # nearly all samples were won
        return low
    return float(brentq(lambda drop: _score(pairs, drop) + z, low, 1.0, xtol=_PRECISION))


def replicated_bound(drops: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Upper bound of the mean drop over the seeds of a training, from its spread over them: Student's t.

    Trainings of other seeds differ by more than the number of samples explains: seeds are the replicates, and samples
    only measure each (X. Bouthillier et al., Accounting for variance in machine learning benchmarks, MLSys 2021).

    Raises:
        ValueError: There are fewer than two drops, which have no spread.
    """
    if len(drops) < 2:
        raise ValueError(f"a spread needs two seeds or more, got {len(drops)}")
    from scipy.special import stdtrit

    return fmean(drops) + float(stdtrit(len(drops) - 1, confidence)) * stdev(drops) / math.sqrt(len(drops))


def learning_bound(replicates: Sequence[Pairs], confidence: float = CONFIDENCE) -> float:
    """Upper bound of the accuracy that training costs: the larger of `replicated_bound` and `upper_bound`.

    The first covers the effect of seeds, but sees no spread where none of the few seeds happened to differ; the second
    covers the uncertainty of samples, but takes those of one seed for independent. Neither alone is a bound.
    """
    spread = replicated_bound([pairs.drop for pairs in replicates], confidence)
    return max(spread, upper_bound(pooled(replicates), confidence))


def fewest(limit: float, confidence: float = CONFIDENCE) -> int:
    """Least number of samples that can decide: without a discordant pair, the bound is within the limit.

    Follows from z**2 / (n + z**2) <= limit; 381 for 1 %.

    Raises:
        ValueError: The limit is not between 0 and 1: no number of samples shows a drop of nothing.
    """
    if not 0.0 < limit < 1.0:
        raise ValueError(f"expected a limit of the accuracy drop between 0 and 1, got {limit}")
    square = NormalDist().inv_cdf(confidence) ** 2
    return math.ceil(square * (1.0 - limit) / limit)


def _score(pairs: Pairs, drop: float) -> float:
    """Tango's statistic for a true drop, under which it is standard normal."""
    n, lost, won = pairs.samples, pairs.lost, pairs.won
    # Most likely probability of a won sample under this drop: the larger root of 2n q**2 + b q + c = 0.
    b = (2 * n - lost + won) * drop - lost - won
    c = -won * drop * (1.0 - drop)
    likely = (math.sqrt(max(b * b - 8.0 * n * c, 0.0)) - b) / (4.0 * n)
    variance = n * (2.0 * likely + drop * (1.0 - drop))
    excess = lost - won - n * drop
    return excess / math.sqrt(variance) if variance > 0.0 else math.copysign(math.inf, excess) if excess else 0.0
