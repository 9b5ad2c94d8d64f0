"""Function transforms: ``torch.func`` over modules, as functions of their parameters and inputs.

Custom autograd functions are workloads, in `accelcheck.workloads.custom`.
"""
