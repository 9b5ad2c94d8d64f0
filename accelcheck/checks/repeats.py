"""Effects of a second call: results of the first must stay as they were, and gradients must add up."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcheck.checks.trial import changed, snapshot
from accelcheck.core.fault import Fault
from accelcheck.workloads.base import Program, Result


def held(program: Program, result: Result) -> Callable[[], list[Fault]]:
    """Returns a function that makes a fault for each tensor of a result that has changed since; keeps the result alive.

    Tensors in memory of inputs, parameters or buffers are left out: these change in place between runs. Gradients are
    held as autograd left them, since those of the result are quotients.
    """
    module = program.module
    leaves = {f"input[{index}]": value for index, value in enumerate(program.inputs) if isinstance(value, Tensor)}
    leaves |= dict(module.named_parameters())
    result = dict(result) | {f"grad:{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    own = {_storage(tensor) for tensor in (*program.inputs, *module.parameters(), *module.buffers())}
    kept = {path: (tensor, snapshot(tensor)) for path, tensor in result.items() if _storage(tensor) not in own}
    return lambda: [fault for path, (tensor, was) in kept.items() for fault in changed(path, tensor, was)]


def _storage(value: Any) -> int:
    try:
        return int(value.untyped_storage()._cdata)  # noqa: SLF001 - unique even if a device hides addresses
    except (AttributeError, NotImplementedError):  # no tensor, or one without storage
        return id(value)


def halved(accumulated: Result, once: Result) -> Result:
    """Halves gradients that a second pass has accumulated over those of one pass, exact unless the sum overflows."""
    return {
        path: _half(tensor, once[path]) if path.startswith("grad:") and path in once else tensor
        for path, tensor in accumulated.items()
    }


def _half(both: Tensor, once: Tensor) -> Tensor:
    if both.shape != once.shape or both.dtype != once.dtype:
        return both
    doubled = once + once
    return torch.where((both == doubled) & doubled.isinf(), once, both / 2)
