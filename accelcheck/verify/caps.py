"""Caps of budgets: beyond them a budget says nothing, and the workload has to change.

Samples of rounding errors give large budgets where rounding decides what a program does (whether a ReLU passes, which of two
numbers is the larger), or where a sum cancels. Such budgets are honest, and useless: any fault passes.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from accelcheck.verify.precision import ACCUMULATOR, UNIT_ROUNDOFF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNITS: Mapping[str, float] = MappingProxyType({"row": 512.0, "column": 1024.0, "block": 512.0, "element": 1024.0})
"""Caps in unit roundoffs; a column of a vector is one element. Rounding errors of a few units are magnified by the condition of a workload: all built-in ones
together show 50 to 150 at most for attention and layer norm, up to 400 for gradients behind several batch norms."""
ACCUMULATED = 4.0
"""Times as many in the accumulator's own precision, in which every sum adds the square root of its length."""
SHARES: Mapping[str, float] = MappingProxyType({"row": 0.65, "block": 0.65, "gain": 0.3})
"""Caps whatever the precision. A result of zeros is 0.71 in its worst row and block, and has a gain of -1."""
SHORT = 16
"""Elements of a row from which on its share is capped: fewer, such as the three of a kernel, are small by chance; blocks hold them."""
FEWEST = 2
"""Elements of a tensor that caps apply to: one number is small by chance in one draw of four, and not in all of them."""


def cap(view: str, unit: float, shape: Sequence[int]) -> float:
    """The largest budget of a view that decides anything; infinite for views without a cap (ULP views), and for single numbers.

    Args:
        view: One of `accelcheck.verify.views.VIEWS`.
        unit: Unit roundoff of the arithmetic precision.
        shape: Of the tensor.
    """
    if math.prod(shape) < FEWEST:
        return math.inf
    wider = ACCUMULATED if unit <= UNIT_ROUNDOFF[ACCUMULATOR] else 1.0
    return min(UNITS.get(view, math.inf) * wider * unit, share(view, shape))


def share(view: str, shape: Sequence[int]) -> float:
    """The same whatever the precision: what a result of zeros exceeds."""
    if math.prod(shape) < FEWEST or (view == "row" and shape[-1] < SHORT):
        return math.inf
    return SHARES.get(view, math.inf)


def beyond(budgets: Mapping[str, float], unit: float, shape: Sequence[int]) -> str:
    """A sentence about the first budget of a tensor that is beyond its cap; empty where none is."""
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
