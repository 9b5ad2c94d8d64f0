"""A network whose depth depends on its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal


class DynamicDepth(nn.Module):
    """A shared layer, applied once and once more for every sample (modulo 4) whose first feature is positive.

    Takes and returns ``(B, width)``.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        depth = 1 + int((x[:, 0] > 0).sum()) % 4
        for _ in range(depth):
            x = torch.tanh(self.cell(x)) + 0.5 * x
        out: Tensor = self.head(x)
        return out


def _problem(generator: torch.Generator, extent: int) -> Problem:
    module = DynamicDepth()
    initialise(module, generator)
    batch = 10 + extent
    x = normal(generator, batch, 32)
    # The gates are +-1 or more in size: no rounding of the input moves one across 0.
    gates = (2 * integers(generator, 0, 2, batch) - 1) * (1.0 + x[:, 0].abs())
    return Problem(module, (torch.cat([gates.unsqueeze(-1), x[:, 1:]], dim=1),))


WORKLOADS = (
    Workload(
        "dynamic-depth",
        "A layer applied one to four times: a Python loop whose length is computed from the input.",
        _problem,
        2,
        traits=frozenset({"branching", "linear", "matmul", "resizable", "scriptable"}),
    ),
)
