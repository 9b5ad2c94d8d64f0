"""Whether two runs gave the same bits, and the distance between them where they did not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from accelcheck.workloads.base import Result


def apart(one: Result, other: Result) -> dict[str, float]:
    """Relative Frobenius distance by path: 0 for the same bits, infinite for other shapes, dtypes or NaN patterns.

    Only NaN payloads and the sign of zero may differ: no operation promises them.

    Args:
        one: Of the first run, on the CPU.
        other: Of the second, on the CPU; paths that only one has are infinitely apart.
    """
    return {
        path: _distance(one[path], other[path]) if path in one and path in other else math.inf
        for path in sorted(one.keys() | other.keys())
    }


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    differing = one != other
    if one.is_floating_point():
        differing &= ~(one.isnan() & other.isnan())
    if not bool(differing.any()):
        return 0.0
    a, b = one[differing].double(), other[differing].double()
    distance = float((a - b).norm()) / max(float(one.double().nan_to_num().norm()), 1e-300)
    return distance if math.isfinite(distance) and distance > 0.0 else math.inf
