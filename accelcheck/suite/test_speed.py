"""Speed: time and memory of right cases beside FP32 eager. Not run with workers, since other load disturbs timing."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.SPEED)
def test_speed(accel_case: Case, accel_check: Check) -> None:
    """Time and memory of a forward pass."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.PLATFORM_SPEED)
def test_platform_speed(accel_case: Case, accel_check: Check) -> None:
    """Eager and graph mode, inference and training, are right; their time beside the host's CPU."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.TRAIN_SPEED)
def test_training_speed(accel_case: Case, accel_check: Check) -> None:
    """Time and memory of a training step."""
    accel_check(accel_case)
