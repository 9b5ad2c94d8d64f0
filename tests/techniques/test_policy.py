"""The precision policy: half precision except in kept modules, casts at their borders, float32 parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import built_in, failed, seeded, verdict_of
from technique_harness import StubDevice, differences, engaged, mlp, named, plain, run, trained, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.matmul import half_sum
from accelcheck.selftest.faults.plant import kernels, nothing
from accelcheck.selftest.faults.training import clipped_scaled, unskipped
from accelcheck.techniques.base import Technique
from accelcheck.techniques.precision import amp, policy
from accelcheck.techniques.precision.policy import TECHNIQUES, cast
from accelcheck.verify import ensemble
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.probes import PROBES

BF16, FP16 = named(TECHNIQUES, "policy-bf16"), named(TECHNIQUES, "policy-fp16")
DEVICE = StubDevice()
DEVICE.dtypes = frozenset({"float32", "bfloat16", "float16"})
TOLERANCE = {"policy-bf16": 0.05, "policy-fp16": 0.01}


class Scored(nn.Module):
    """An embedding, a norm, a linear layer, a softmax, and a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.shift = nn.Parameter(torch.ones(8))
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.softmax = nn.Softmax(-1)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.norm(self.embedding(tokens) + self.shift)
        self.seen["between"] = x.dtype
        x = self.linear(x)
        return {"scores": self.softmax(x), "all": (x, tokens)}


def scored() -> Problem:
    torch.manual_seed(0)
    module = Scored()
    return Problem(module, (torch.randint(11, (4, 5)),))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_modules_compute_in_half_with_float32_inputs_and_outputs(technique: Any, mode: Mode) -> None:
    problem = scored()
    ran = engaged(technique, problem, mode)
    assert not differences(ran.result, plain(scored(), mode), TOLERANCE[technique.name])
    assert problem.module.seen == {"between": technique.dtype}
    floats = {path: tensor for path, tensor in ran.result.items() if tensor.is_floating_point()}
    assert {tensor.dtype for tensor in floats.values()} == {torch.float32}
    assert ran.result["out['all'][1]"].dtype is torch.int64
    claims = {entry.claim: entry.observed for entry in ran.evidence}
    assert claims["norms, embeddings, softmax that took float32 >= 3"] == 3


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_training_scales_only_fp16_losses_and_keeps_parameters(technique: Any) -> None:
    ran = engaged(technique, mlp(), Mode.TRAIN)
    assert (ran.program.scaler is not None) is (technique.dtype is torch.float16)
    assert not differences(ran.result, plain(mlp(), Mode.TRAIN), TOLERANCE[technique.name])


def test_a_norm_in_half_precision_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "KEPT", (nn.Embedding, nn.Softmax))
    ran = run(BF16, scored())
    assert ran.missing() == ["norms, embeddings, softmax that took bfloat16 = 0: 1"]


def test_a_linear_layer_in_float32_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "KEPT", (*policy.KEPT, nn.Linear))
    missing = run(BF16, scored()).missing()
    assert "contractions that took bfloat16 >= 1: 0" in missing
    assert "contractions that took float32 <= 0: 1" in missing


def test_a_model_without_casts_fails_the_evidence() -> None:
    ran = run(BF16, scored())
    program = Program.of(scored())
    with BF16.watch("cpu") as log:
        program.run(Mode.FORWARD)
    assert ran.engaged
    assert not all(entry.engaged for entry in BF16.evidence(program, log, Mode.FORWARD, DEVICE))


def test_a_head_that_shares_its_weight_with_a_table_is_half_all_the_same() -> None:
    class Tied(Scored):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> dict[str, Any]:
            x = self.norm(self.embedding(tokens))
            return {"scores": self.softmax(self.head(x))}

    engaged(BF16, Problem(Tied(), (torch.randint(11, (4, 5)),)), Mode.BACKWARD, DEVICE)


def test_parameters_changed_in_place_take_effect() -> None:
    program = Program.of(mlp())
    BF16.prepare(program, Mode.FORWARD, DEVICE)
    program.run(Mode.FORWARD)
    with torch.no_grad():
        for parameter in program.module.parameters():
            parameter.zero_()
    assert float(program.run(Mode.FORWARD)["out"].abs().sum()) == 0.0


def test_batch_statistics_stay_float32_and_are_updated() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    ran = engaged(FP16, trained(module, torch.randn(16, 6), torch.randn(16, 6)), Mode.TRAIN)
    mean = ran.result["buffer:1.running_mean"]
    assert mean.dtype is torch.float32
    assert float(mean.abs().sum()) > 0


def test_cast_converts_nested_values_but_not_integers() -> None:
    given = {"a": (torch.ones(2), [torch.ones(2, dtype=torch.int32)]), "b": 3}
    got = cast(given, torch.float16)
    assert got["a"][0].dtype is torch.float16
    assert got["a"][1][0].dtype is torch.int32
    assert got["b"] == 3


def test_it_needs_the_dtype_and_a_listed_workload() -> None:
    assert BF16.capability(DEVICE).ok
    narrow = StubDevice()
    narrow.dtypes = frozenset({"float32"})
    assert BF16.capability(narrow).code is Code.NO_DTYPE
    assert BF16.accepts(built_in()["transformer-block"])
    assert not BF16.accepts(built_in()["mlp"])
    assert BF16.accepts(workload("linear"))
    assert BF16.admits(PROBES["huge"])
    assert not FP16.admits(PROBES["huge"])


# Faults 29, 30 and 31: a wrong scaler, a wrong clipping, a wrong reduction
TRAJECTORY = {"policy-fp16": FP16, "grad-scaler-fp16": named(amp.TECHNIQUES, "grad-scaler-fp16")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named_line"),
    [(clipped_scaled(1.0), "[initial scale 65536]"), (unskipped(1.0), "scaler: step 2"), (nothing, "")],
    ids=["clipped-before-unscale", "step-not-skipped", "healthy"],
)
@pytest.mark.parametrize("technique", TRAJECTORY.values(), ids=TRAJECTORY)
def test_scaler_faults_fail_in_a_long_training(
    technique: Technique, change: Change, named_line: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensemble, "SAMPLES", 2)  # fewer samples give tighter budgets, which these faults exceed by far
    record = verdict_of(store, Planted(technique, change), seeded("trajectory-mlp"), Mode.TRAJECTORY)
    if not named_line:
        assert record.verdict is Verdict.PASS, record.why + record.traceback
        return
    assert record.verdict is Verdict.FAIL, record.why + record.traceback
    assert named_line in record.why


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("change", "verdict"), [(kernels(sum=half_sum), Verdict.FAIL), (nothing, Verdict.PASS)])
def test_a_large_sum_in_fp16_fails(change: Change, verdict: Verdict, store: Store) -> None:
    technique = Planted(named(amp.TECHNIQUES, "amp-fp16"), change)
    assert verdict_of(store, technique, seeded("matmul-total")).verdict is verdict


@pytest.mark.slow
def test_a_norm_with_two_percent_error_fails_in_half_precision(store: Store) -> None:
    def shifted(func: Any, x: Tensor, shape: list[int], weight: Tensor, *rest: Any) -> Any:
        return func(x, shape, weight * 1.02, *rest)

    record = failed(store, Planted(BF16, kernels(native_layer_norm=shifted)), seeded("mlp-blocks"))
    assert "not engaged" not in record.why
