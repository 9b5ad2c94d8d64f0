"""The compute platform: its dtypes, distributed backend, C++ extensions, profiler, and import in new processes."""

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.suite import Check


@pytest.mark.accel(Mode.PLATFORM)
def test_platform(accel_case: Case, accel_check: Check) -> None:
    """The platform has the item, and it is right."""
    accel_check(accel_case)
