"""The workloads: models and functions that techniques are applied to, one file a family, each with its `WORKLOADS`."""
