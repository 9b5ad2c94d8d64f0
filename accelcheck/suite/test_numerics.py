"""Numerics: every selected case, judged by the FP64 oracle."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.FORWARD)
def test_equivalence(accel_case: Case, accel_check: Check) -> None:
    """The outputs of a forward pass are right."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.BACKWARD)
def test_gradients(accel_case: Case, accel_check: Check) -> None:
    """The outputs in training mode, every gradient, and every buffer are right."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.TRAIN)
def test_training(accel_case: Case, accel_check: Check) -> None:
    """Losses, final parameters and buffers of a short training are right."""
    accel_check(accel_case)
