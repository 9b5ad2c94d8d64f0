"""Function transforms: ``torch.func`` over modules, as functions of their parameters and inputs."""
