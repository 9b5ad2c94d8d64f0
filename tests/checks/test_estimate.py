from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from accelcheck.checks.estimate import CASE_SECONDS, TIMED_SECONDS, seconds_of
from accelcheck.core.case import Mode
from accelcheck.core.selection import Selection
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.own_model import workload_of

if TYPE_CHECKING:
    from accelcheck.core.case import Case


class Sleeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return x + 1


def test_an_estimate_grows_with_the_pass_the_cases_and_their_references() -> None:
    known = Matrix.load()
    workload = workload_of(Sleeping(), (torch.randn(3, 4),))
    matrix = Matrix(known.techniques, {workload.name: workload})

    def cases(*names: str) -> list[Case]:
        selection = Selection(("cpu",), names, (workload.name,), ("float32",), level=2)
        return matrix.cases(selection, (Mode.FORWARD,))

    once, one = seconds_of(cases("eager"), matrix, workload)
    assert 0.05 <= once < 5
    assert one > CASE_SECONDS[""] + 16 * 0.05  # 4 runs of 4 draws
    _, two = seconds_of(cases("eager", "compile-static"), matrix, workload)
    assert two - one > CASE_SECONDS["compilation"] > CASE_SECONDS[""]
    selection = Selection(("cpu",), ("compile-static",), (workload.name,), ("float32",), level=2)
    _, timed = seconds_of(matrix.cases(selection, (Mode.SPEED,)), matrix, workload)
    assert timed > TIMED_SECONDS
