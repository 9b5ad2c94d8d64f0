"""A workload of your own: a gated feed-forward block (SwiGLU), in inference and in training.

Run it in this folder, for instance under autocast:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-workload=swiglu --accel-technique='amp-*'

It prints, among other lines:

    technique  cpu
    amp-bf16   3 pass
    amp-fp16   2 pass
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, silu

from accelcheck.api import Mode, Problem, Workload

WIDTH, HIDDEN = 32, 64


class SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``; ``(..., WIDTH)`` to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


def make(generator: torch.Generator, extent: int) -> Problem:
    """24 rows, and `extent` more where a technique tries other sizes. All inputs come from the generator."""
    rows = 24 + extent
    return Problem(
        SwiGlu(),
        inputs=(torch.randn(rows, WIDTH, generator=generator),),
        target=torch.randn(rows, WIDTH, generator=generator),
        loss=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )


SWIGLU = Workload(
    "swiglu",
    "A gated feed-forward block.",
    make,
    modes=frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN}),
    traits=frozenset({"matmul", "linear", "resizable", "training"}),
    probes=frozenset({"zeros", "one-hot", "nan[0]"}),
)


def pytest_accel_workloads() -> list[Workload]:
    """Register the workload."""
    return [SWIGLU]
