"""QAT: the emulation equals torchao's training, conversion keeps weights and outputs, and faults of either fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import Bed, seeded, verdict_of
from technique_harness import StubDevice, differences, engaged, mlp, run
from torch import Tensor, nn

from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.quantization import qat
from accelcheck.techniques.quantization.emulation import eval_copy, replaced
from accelcheck.techniques.quantization.qat import TECHNIQUES, FakeQuantized, FakeQuantizer
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program

(TECHNIQUE,) = TECHNIQUES
without_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


def test_activations_are_quantized_by_rows() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.3, 3.0], [0.0, 0.0, 0.0, 1e-3]]).double()
    out = FakeQuantizer(symmetric=False)(x)
    assert torch.equal(out[:, 1], torch.zeros(2).double()), "0 stays 0"
    assert float((out - x).abs()[0].max()) <= 4 / 255 / 2 + 1e-6
    assert float((out - x).abs()[1].max()) <= 1e-3 / 255 / 2 + 1e-9


def test_gradients_pass_except_where_values_are_clipped() -> None:
    # The largest value of a symmetric row is at 127.5 and rounds to 128, which exceeds eight bits.
    x = torch.tensor([[127.5, 63.0, -31.0]], dtype=torch.float64, requires_grad=True)
    quantizer = FakeQuantizer(symmetric=True)
    quantizer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0, 1.0]]


def test_flips_switch_gradients_at_the_end_of_the_range() -> None:
    quantizer = FakeQuantizer(symmetric=True)
    quantizer.flips = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(20):
        x = torch.tensor([[127.5, 63.0, -31.0]], dtype=torch.float64, requires_grad=True)
        quantizer(x).sum().backward()
        assert x.grad is not None
        seen.add(float(x.grad[0, 0]))
    assert seen == {0.0, 1.0}


@without_torchao
def test_the_emulation_equals_torchaos_training() -> None:
    mode = Mode.BACKWARD
    ran = engaged(TECHNIQUE, mlp(), mode)
    program = Program.of(mlp())
    emulated = replaced(eval_copy(program.module).double(), FakeQuantized).train()
    exact = Program(
        module=emulated,
        inputs=tuple(value.double() for value in program.inputs),
        seed=program.seed,
    ).run(mode)
    assert not differences(ran.result, exact, 1e-4)
    plain = Program.of(mlp()).run(mode)
    assert differences(plain, exact, 1e-4)


@without_torchao
def test_conversion_keeps_weights_and_outputs() -> None:
    ran = run(TECHNIQUE, mlp(), Mode.TRAIN)
    observed = {entry.claim: entry.observed for entry in ran.evidence}
    assert observed["fake-quantized linear layers = 2 >= 1"] == 2
    assert observed["layers converted to int8 weights = 2"] == 2
    assert observed["elements of weights that conversion changed = 0"] == 0
    assert (
        0.0
        <= float(observed["difference of converted layers' outputs, relative to the rounding bound of their sums <= 1"])
        <= 1.0
    )


@without_torchao
def test_the_model_stays_in_its_mode() -> None:
    ran = run(TECHNIQUE, mlp(), Mode.TRAIN)
    assert ran.program.module.training
    kind = importlib.import_module("torchao.quantization.qat.linear").FakeQuantizedLinear
    assert sum(isinstance(part, kind) for part in ran.program.module.modules()) == 2, "converted is a copy"


@without_torchao
def test_a_conversion_to_another_scheme_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    right = qat._quantize

    def other(module: nn.Module, step: str) -> None:
        right(module, step)
        if step == "convert":
            for part in module.modules():
                if type(part) is nn.Linear:
                    with torch.no_grad():
                        part.weight.scale.mul_(1.01)  # type: ignore[attr-defined]  # torchao's own

    monkeypatch.setattr(qat, "_quantize", other)
    missing = run(TECHNIQUE, mlp(), Mode.BACKWARD).missing()
    assert len(missing) == 2
    assert missing[0].startswith("elements of weights that conversion changed = 0")


@without_torchao
def test_an_unprepared_model_fails_the_evidence() -> None:
    program = Program.of(mlp())
    program.extras["linear layers"] = 2
    with TECHNIQUE.watch("cpu") as log:
        program.run(Mode.BACKWARD)
    seen = list(TECHNIQUE.evidence(program, log, Mode.BACKWARD, StubDevice()))
    assert sum(not call.engaged for call in seen) >= 4


def every_layer(edit: Callable[[Any], None]) -> Change:
    def change(program: Program) -> None:
        for layer in program.module.modules():
            if type(layer).__name__ == "FakeQuantizedLinear":
                edit(layer)

    return change


def zero_off(layer: Any) -> None:
    """Activations are dequantized with a zero point that is one too large."""
    quantizer = layer.activation_fake_quantizer
    forward = quantizer.forward
    quantizer.forward = lambda x: forward(x) - quantizer.scale.reshape(*x.shape[:-1], 1)


def no_gradient(layer: Any) -> None:
    """Rounding passes no gradient, so that quantized weights do not learn."""
    forward = layer.weight_fake_quantizer.forward
    layer.weight_fake_quantizer.forward = lambda x: forward(x).detach() + 0 * x


def wrong_axis(layer: Any) -> None:
    """Weights have one scale per input channel."""

    def forward(x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(0, keepdim=True) / 127.5
        return x + (torch.round(x / scale).clamp(-128, 127) * scale - x).detach()

    layer.weight_fake_quantizer.forward = forward


def four_bits(layer: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(1, keepdim=True) / 7.5
        return x + (torch.round(x / scale).clamp(-8, 7) * scale - x).detach()

    layer.weight_fake_quantizer.forward = forward


def unquantized_inputs(layer: Any) -> None:
    layer.activation_fake_quantizer.enabled = False


@pytest.mark.slow(after=1)
@without_torchao
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (zero_off, "view"),
        (no_gradient, "grad:"),
        (four_bits, "view"),
        (wrong_axis, "conversion changed"),
        (unquantized_inputs, "operands rounded"),
        (None, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_of_fake_quantization_fail(edit: Any, named: str, store: Store) -> None:
    change = nothing if edit is None else every_layer(edit)
    record = verdict_of(store, Planted(TECHNIQUE, change), seeded("mlp-blocks"), Mode.BACKWARD)
    assert record.verdict is (Verdict.PASS if edit is None else Verdict.FAIL), record.why + record.traceback
    assert named in record.why


def test_it_needs_torchao() -> None:
    answer = TECHNIQUE.answer(Bed())
    assert answer.ok or "torchao" in answer.reason
    assert TECHNIQUE.accepts(seeded("train-mlp"))
    assert not TECHNIQUE.accepts(seeded("matmul"))
