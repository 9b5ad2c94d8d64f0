"""Records of the compile curve: compiled chains beside eager, and the break-even number of statements. No torch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

COUNTS = (1, 2, 5, 10, 15, 20, 25, 30)
"""Numbers of statements, as published."""
MOST = 100
"""Most statements: in longer chains, rounding errors are no longer small."""
COLUMNS = 16
ROWS = tuple(range(4, 14))
"""Numbers of rows of varying shapes, 4 to 13, as published."""
FIXED_ROWS = 16
"""Rows of the fixed shape, unlike all varying shapes, so that nothing was compiled for it before."""


class Form(StrEnum):
    """Form of compilation."""

    STATIC = "static"
    """``dynamic=False``: compiled for each shape."""
    DYNAMIC = "dynamic"
    """``dynamic=True``: compiled once for all shapes."""


class Shapes(StrEnum):
    """Shapes of the inputs."""

    FIXED = "fixed"
    VARYING = "varying"


@dataclass(frozen=True, slots=True)
class Point:
    """One form of one chain on one kind of shapes, beside eager.

    Attributes:
        eager, seconds: Median seconds of one call, eager and compiled, without compilation.
        ratio: Compiled time divided by eager's, the median over pairs.
        low, high: Interval of the ratio.
        first: Seconds of the first pass over all shapes, with compilation.
        eager_first: The same for eager.
        graphs: Number of graphs that Dynamo captured, recompilations included.
        recompilations: Number of graphs of code that had been compiled before.
        programs: Number of programs that XLA compiled in that pass; None on other devices.
    """

    count: int
    shapes: Shapes
    form: Form
    eager: float
    seconds: float
    ratio: float
    low: float
    high: float
    pairs: int
    first: float
    eager_first: float
    graphs: int
    recompilations: int
    programs: int | None = None

    @property
    def repaid(self) -> int | None:
        """Number of calls after which compilation has paid for itself; None if a call is not faster."""
        if self.high >= 1.0:
            return None
        return max(0, round((self.first - self.eager_first) / (self.eager * (1.0 - self.ratio))))


@dataclass(frozen=True, slots=True)
class Gap:
    """A form that does not exist on this device or did not run, and the reason."""

    count: int
    shapes: Shapes
    form: Form
    reason: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The number of statements from which on a form is faster than eager.

    Attributes:
        slower: Largest count at which the whole interval is above 1: it is slower for certain.
        faster: Smallest count from which on it is faster for certain at every measured count.
        estimate: Count between the two at which a line through the logarithms of the ratios crosses 1.
        last: Largest measured count; None if there is none.
    """

    slower: int | None
    faster: int | None
    estimate: float | None
    last: int | None


def break_even(points: Sequence[Point]) -> BreakEven:
    """The break-even of the points of one form and kind of shapes."""
    ordered = sorted(points, key=lambda point: point.count)
    if not ordered:
        return BreakEven(None, None, None, None)
    faster = None
    for point in reversed(ordered):
        if point.high >= 1.0:
            break
        faster = point.count
    slower = max((point.count for point in ordered if point.low > 1.0), default=None)
    return BreakEven(slower, faster, _crossing(ordered) if faster is not None else None, ordered[-1].count)


def _crossing(ordered: Sequence[Point]) -> float | None:
    """Count at which medians last fall below 1, by a line on the logarithms; None if they never do."""
    for before, after in reversed(list(itertools.pairwise(ordered))):
        if after.ratio < 1.0 <= before.ratio:
            high, low = math.log(before.ratio), math.log(after.ratio)
            return before.count + (after.count - before.count) * high / (high - low)
    return None
