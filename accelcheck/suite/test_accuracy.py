"""Task accuracy: trained models on held-out samples, and the accuracy that training reaches, against FP32 eager."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.ACCURACY)
def test_accuracy(accel_case: Case, accel_check: Check) -> None:
    """A trained model keeps its accuracy under the technique."""
    accel_check(accel_case)


@pytest.mark.accel(Mode.LEARNING)
def test_learning(accel_case: Case, accel_check: Check) -> None:
    """Training with the technique reaches the accuracy of training without it."""
    accel_check(accel_case)
