"""Function transforms: ``torch.func`` over modules. Custom autograd functions are workloads."""
