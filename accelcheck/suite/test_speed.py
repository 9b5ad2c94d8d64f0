"""Is it fast? Time and memory beside FP32 eager, of what is right. Not with workers: timing needs the machine for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record

    Check = Callable[[Case], Record]


@pytest.mark.accel(Mode.SPEED)
def test_speed(accel_case: Case, accel_check: Check) -> None:
    """A forward pass."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.TRAIN_SPEED)
def test_training_speed(accel_case: Case, accel_check: Check) -> None:
    """A training step."""
    accel_check(accel_case)
