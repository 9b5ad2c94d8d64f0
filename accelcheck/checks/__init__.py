"""The checks: each takes a case to its verdict.

In the process of the cases, `execute` chooses a check by the case's mode; in pytest's, `supervisor` applies baselines,
limits and ledgers to the record that comes back.

Tensors are judged by `accelcheck.verify`, and time and memory are measured by `accelcheck.measure`.
"""
