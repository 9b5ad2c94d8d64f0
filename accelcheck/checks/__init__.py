"""The checks: each takes a case to its verdict. `execute` chooses one by the case's mode and holds its verdict against the ledger.

How a tensor is judged belongs in `accelcheck.verify`, and how time and memory are measured in `accelcheck.measure`.
"""
