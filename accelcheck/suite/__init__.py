"""The suite: a handful of generic tests, run with ``pytest --pyargs accelcheck.suite``."""
