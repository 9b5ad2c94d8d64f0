from __future__ import annotations

import pytest
import torch
from technique_harness import MODES, StubDevice, engaged, mlp, plain, seen

from accelcheck.core.case import Mode
from accelcheck.techniques.eager import TECHNIQUES
from accelcheck.techniques.observe import Operator
from accelcheck.workloads.base import Program

(EAGER,) = TECHNIQUES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", EAGER.dtypes)
def test_it_changes_nothing_and_its_operators_are_evidence(mode: Mode, dtype: str) -> None:
    stored: torch.dtype = getattr(torch, dtype)
    ran = engaged(EAGER, mlp(), mode, dtype=stored)
    other = plain(mlp(), mode, dtype=stored)
    assert ran.result.keys() == other.keys()
    assert all(torch.equal(ran.result[path], other[path]) for path in other)


def test_a_run_without_operators_fails_the_evidence() -> None:
    first, _ = EAGER.evidence(Program.of(mlp()), seen("cpu"), Mode.FORWARD, StubDevice())
    assert not first.engaged


def test_an_operator_computed_elsewhere_is_named() -> None:
    log = seen("cuda", "aten::mm")
    log.operators.append(Operator("aten::topk", ((torch.float32, True, "cuda"),), ((torch.float32, True, "cpu"),)))
    first, second = EAGER.evidence(Program.of(mlp()), log, Mode.FORWARD, StubDevice("cuda"))
    assert first.engaged
    assert not second.engaged
    assert second.observed == "aten::topk x1"
