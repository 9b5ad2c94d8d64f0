"""The checks: each takes a case to its verdict.

In the process of the cases, `execute` chooses a check by the case's mode; in pytest's, `supervisor` applies baselines,
limits and ledgers to the record that comes back.

How a tensor is judged belongs in `accelcheck.verify`, and how time and memory are measured in `accelcheck.measure`.
"""
