"""Randomness: rate, independence and scale of dropout masks, seeds, the gradient's mask, evaluation mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Case, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.core.journal import Record

    Check = Callable[[Case], Record]


@pytest.mark.accel(Mode.RANDOM)
def test_randomness(accel_case: Case, accel_check: Check) -> None:
    """Random operations have the right distribution and follow their seeds."""
    accel_check(accel_case)
