"""The workloads: models and functions that techniques are applied to, one file a family, each with its `WORKLOADS`.

Nothing here knows a technique or a device; how a program is judged belongs in `accelcheck.checks`.
"""
