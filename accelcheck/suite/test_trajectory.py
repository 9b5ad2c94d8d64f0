"""Long trainings: every selected case, judged by the differences that rounding and seeds alone cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Case, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.core.journal import Record


@pytest.mark.accel(Mode.TRAJECTORY)
def test_trajectory(accel_case: Case, accel_check: Callable[[Case], Record]) -> None:
    """Losses, gradient norms and parameters of a long training, its resumption, and its gradient scaler are right."""
    accel_check(accel_case)
