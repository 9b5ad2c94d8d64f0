from __future__ import annotations

import pytest
import torch
from technique_harness import MODES, StubDevice, differences, engaged, mlp, named, plain, run, trained, workload
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.precision.amp import INITIAL_SCALE, TECHNIQUES
from accelcheck.workloads.base import Problem

AUTOCAST = [technique for technique in TECHNIQUES if technique.name.startswith("amp")]
SCALED = named(TECHNIQUES, "grad-scaler-fp16")
TOLERANCE = {"bfloat16": 0.05, "float16": 0.01}


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", MODES)
def test_contractions_in_half_precision_are_evidence_and_values_hold(technique: Technique, mode: Mode) -> None:
    if mode not in technique.modes:
        pytest.skip("no gradients to scale")
    ran = engaged(technique, mlp(), mode)
    assert not differences(ran.result, plain(mlp(), mode), TOLERANCE[technique.precision("float32")])


def test_outputs_are_half_and_gradients_are_not() -> None:
    ran = run(named(TECHNIQUES, "amp-bf16"), mlp(), Mode.BACKWARD)
    assert ran.result["out"].dtype is torch.bfloat16
    assert ran.result["grad:0.weight"].dtype is torch.float32


def test_a_contraction_in_float32_fails_the_evidence() -> None:
    class Opted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear gives it
            with torch.autocast("cpu", enabled=False):
                return super().forward(input.float())

    problem = Problem(nn.Sequential(nn.Linear(8, 8), Opted(8, 8)), (torch.randn(4, 8),))
    ran = run(named(TECHNIQUES, "amp-bf16"), problem)
    assert ran.missing() == ["contractions that took float32 <= 0: 1"]


def test_without_autocast_the_evidence_fails() -> None:
    class Off(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as above
            with torch.autocast("cpu", enabled=False):
                return super().forward(input)

    ran = run(named(TECHNIQUES, "amp-fp16"), Problem(Off(8, 8), (torch.randn(4, 8),)))
    assert not ran.evidence[0].engaged


class Attention(nn.Module):
    """Three dimensions: the fused CPU kernel needs four, so torch uses the math path."""

    def __init__(self, *, autocast: bool = True) -> None:
        super().__init__()
        self.autocast = autocast

    def forward(self, q: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=self.autocast):
            return functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_attention_by_matmul_may_compute_in_float32(mode: Mode) -> None:
    problem = Problem(nn.Sequential(nn.Linear(8, 8), Attention()), (torch.randn(2, 4, 8),))
    engaged(named(TECHNIQUES, "amp-bf16"), problem, mode)


@pytest.mark.parametrize("technique", AUTOCAST, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_an_attention_alone_that_casts_its_half_operands_up_is_evidence(technique: Technique, mode: Mode) -> None:
    ran = engaged(technique, Problem(Attention(), (torch.randn(2, 4, 8),)), mode)
    assert ran.evidence[0].claim == f"contractions or attentions that took {technique.precision('float32')} >= 1"
    assert ran.evidence[0].observed == 1


@pytest.mark.parametrize("technique", AUTOCAST, ids=lambda technique: technique.name)
def test_an_attention_alone_in_float32_is_no_evidence(technique: Technique) -> None:
    ran = run(technique, Problem(Attention(autocast=False), (torch.randn(2, 4, 8),)))
    assert ran.missing() == [f"contractions that took {technique.precision('float32')} >= 1: 0"]


def test_the_scale_stays_and_every_step_is_checked() -> None:
    ran = run(SCALED, mlp(), Mode.TRAIN)
    observed = {entry.claim: entry.observed for entry in ran.evidence}
    assert observed["losses scaled >= 3"] == 3
    assert observed[f"scale after = {INITIAL_SCALE:g} (no step skipped)"] == INITIAL_SCALE
    assert observed["checks for infinite gradients >= 3"] == 3


def test_a_skipped_step_fails_the_evidence() -> None:
    torch.manual_seed(0)
    problem = trained(nn.Linear(8, 8), 1e3 * torch.randn(64, 8), 1e4 * torch.randn(64, 8))
    ran = run(SCALED, problem, Mode.TRAIN)
    assert any("no step skipped" in line for line in ran.missing())


def test_without_a_step_the_scale_is_halved_until_gradients_are_finite() -> None:
    problem = Problem(nn.Linear(8, 8), (torch.full((2048, 8), 30.0),))
    ran = engaged(SCALED, problem, Mode.BACKWARD)
    scale = next(entry.observed for entry in ran.evidence if "no step skipped" in entry.claim)
    assert isinstance(scale, float)
    assert 1.0 <= scale < INITIAL_SCALE


def test_an_overflow_without_scaling_fails_the_evidence() -> None:
    problem = Problem(nn.Linear(8, 8), (torch.full((2048, 8), 3e4),))
    ran = run(SCALED, problem, Mode.BACKWARD)
    assert "scaled gradients that overflowed = 0: 1" in ran.missing()


@pytest.mark.parametrize("technique", AUTOCAST, ids=lambda technique: technique.name)
def test_it_needs_the_feature_and_a_contraction(technique: Technique) -> None:
    assert technique.capability(StubDevice()).ok
    assert technique.capability(StubDevice(features=())).code is Code.NO_FEATURE
    assert technique.accepts(workload("linear"))
    assert not technique.accepts(workload("inplace"))
