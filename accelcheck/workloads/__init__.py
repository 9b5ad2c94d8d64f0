"""Workloads: models and functions that techniques are applied to, one file a family, each with its `WORKLOADS`.

Nothing here knows a technique, or which device a program runs on; programs are judged in `accelcheck.checks`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from accelcheck.core.registry import discover, index

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.workloads.base import Workload


@functools.cache
def builtin() -> Mapping[str, Workload]:
    """Workloads of this package, by name. Imports all of them, and with them torch."""
    return index("workload", discover("accelcheck.workloads", "WORKLOADS"))
