"""The suite: a handful of generic tests, run with ``pytest --pyargs accelcheck.suite``.

A test here names a mode and nothing else: how a case is judged belongs in `accelcheck.checks`.
"""
