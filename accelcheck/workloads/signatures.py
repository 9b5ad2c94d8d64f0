"""Types that programs and trainers share: what a run gives, and what a problem's loss and optimizer take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Result = dict[str, Tensor]
"""What a run produced, by path: ``out``, ``out[1]['hidden']``, ``grad:input[0]``, ``grad:fc1.weight``,
``buffer:bn.running_mean``, ``loss[2]``, ``parameter:fc1.weight``."""

OptimizerMaker = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters."""

Loss = Callable[[Any, Tensor], Tensor]
"""The loss, 0-D, of a module's output and a target."""

Batch = tuple[tuple[Any, ...], Tensor | None]
"""Inputs and target of a step."""
