"""The suite: a handful of generic tests, run with ``pytest --pyargs accelcheck.suite``.

A test names a mode, and passes each case to the fixture `accel_check` of `accelcheck.plugin.hooks`. Code that judges a
case belongs in `accelcheck.checks`.
"""

from collections.abc import Callable

from accelcheck.core.case import Case
from accelcheck.core.journal import Record

Check = Callable[[Case], Record]
"""Type of the fixture `accel_check`."""
