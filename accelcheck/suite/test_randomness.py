"""Randomness: rate, independence and scale of dropout masks, seeds, the gradient's mask, evaluation mode."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.RANDOM)
def test_randomness(accel_case: Case, accel_check: Check) -> None:
    """Random operations have the right distribution and follow their seeds."""
    accel_check(accel_case)
