"""Fixtures of accelcheck's own tests."""

pytest_plugins = ["pytester"]
