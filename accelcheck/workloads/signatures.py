"""Types shared by programs and trainers: the result of a run, and the signatures of a problem's loss and optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Result = dict[str, Tensor]
"""Tensors of a run, by path: ``out``, ``out[1]['hidden']``, ``grad:input[0]``, ``grad:fc1.weight``,
``buffer:bn.running_mean``, ``loss[2]``, ``parameter:fc1.weight``."""

OptimizerMaker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters."""

Target = Tensor | tuple[Tensor, ...] | None
"""Second argument of a loss: user-owned ones may take several tensors."""

Loss = Callable[[Any, Any], Tensor]
"""Loss, 0-D, of a module's output and a target."""

Batch = tuple[tuple[Any, ...], Target]
"""Inputs and target of a step."""


def tensors_in(target: Target) -> tuple[Tensor, ...]:
    """Tensors of a target, in order."""
    if target is None:
        return ()
    return target if isinstance(target, tuple) else (target,)
