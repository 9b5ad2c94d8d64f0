"""Long trainings: every selected case, judged by the differences that rounding and seeds alone cause."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.TRAJECTORY)
def test_trajectory(accel_case: Case, accel_check: Check) -> None:
    """Losses, gradient norms and parameters of a long training, its resumption, and its gradient scaler are right."""
    accel_check(accel_case)
