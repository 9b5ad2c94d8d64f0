"""The suite: a handful of generic tests, run with ``pytest --pyargs accelcheck.suite``.

A test names a mode, and passes each case to the fixture `accel_check` of `accelcheck.plugin.hooks`. Code that judges a
case belongs in `accelcheck.checks`.
"""
