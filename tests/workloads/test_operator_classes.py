"""Level 1 judges each class of operators under eager with no other class in front of it."""

from __future__ import annotations

import re

import pytest
import torch
from fault_harness import Bed, built_in
from operator_classes import CLASSES, NEUTRAL
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.core.selection import Selection
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.observe import OperatorLog
from accelcheck.workloads.base import Program


def test_every_class_has_a_case_at_level_1() -> None:
    cases = Matrix.load().cases(Selection(("cpu",), ("eager",), level=1))
    listed = {(case.workload, case.mode, case.dtype) for case in cases}
    for workload, _, mode in CLASSES.values():
        assert (workload, mode, "float32") in listed
    assert {dtype for workload, _, dtype in listed if workload == "reductions"} == {"float32", "bfloat16", "float16"}


class Given(Program):
    """Its output gradients are ones: the engine draws them on the CPU."""

    def cotangent(self, path: str, out: Tensor) -> Tensor:
        return torch.ones_like(out)


KEPT = {Mode.BACKWARD: r"add|clone|div", Mode.RANDOM: "div", Mode.TRAIN: r"clone|profiler::\w+"}
"""Sums of gradients of one input, and kept buffers, losses and gradients: behind all that is judged."""


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_case_of_a_class_has_operators_of_no_other_class(name: str) -> None:
    workload, pattern, mode = CLASSES[name]
    program = Given.of(built_in()[workload].problem(0))
    with OperatorLog("cpu") as log:
        program.run(Mode.BACKWARD if mode is Mode.RANDOM else mode)
    names = {operator.removeprefix("aten::") for operator in log.names()}
    names = {operator for operator in names if not re.fullmatch(KEPT.get(mode, ""), operator)}
    own = {operator for operator in names if re.fullmatch(pattern, operator)}
    assert own
    assert {operator for operator in names - own if not re.fullmatch(NEUTRAL, operator)} == set()


def test_they_are_tried_under_eager_alone() -> None:
    names = {workload for workload, _, _ in CLASSES.values()}
    cases = Matrix.load().cases(Selection((Bed.name,), workloads=tuple(names), level=4))
    assert {case.technique for case in cases} == {"eager"}
    assert {case.workload for case in cases} == names
