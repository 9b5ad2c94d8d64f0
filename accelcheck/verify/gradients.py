"""Whether analytic gradients are those of the function: finite differences in FP64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

if TYPE_CHECKING:
    from accelcheck.workloads.base import Program


def check(program: Program, *, twice: bool) -> None:
    """See that the gradients of an FP64 program, and theirs if so asked, agree with finite differences.

    Along random directions (``fast_mode``): the whole Jacobian of a workload would take minutes.

    Args:
        program: FP64, on the CPU.
        twice: Whether second derivatives are checked too.

    Raises:
        torch.autograd.gradcheck.GradcheckError: They do not agree; the message has both numbers.
    """
    module = program.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    floats = [v for v in program.inputs if isinstance(v, Tensor) and v.is_floating_point()]
    leaves = [value.detach().requires_grad_() for value in floats]

    def call(*values: Any) -> Any:
        fresh = iter(values[: len(leaves)])
        inputs = [next(fresh) if isinstance(v, Tensor) and v.is_floating_point() else v for v in program.inputs]
        return module(*inputs)

    with torch.random.fork_rng(devices=[]):
        # Directions of second derivatives are drawn from it: the same ones in every run.
        torch.default_generator.manual_seed(0)
        gradcheck(call, (*leaves, *parameters), fast_mode=True)
        if twice:
            gradgradcheck(call, (*leaves, *parameters), fast_mode=True)
