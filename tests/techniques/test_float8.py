"""float8: kernels equal the emulation, faults exceed rounding, and the evidence distinguishes it from FP32."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fault_harness import Bed, failed, seeded, verdict_of
from technique_harness import StubDevice, engaged, named, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.plant import nothing, truncated_to
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.quantization import float8, torchao
from accelcheck.techniques.quantization.emulation import eval_copy, nearest, summed
from accelcheck.techniques.quantization.float8 import TECHNIQUES, Float8Linear, ScaledProduct, WidenedLinear, quantize
from accelcheck.techniques.quantization.int8 import Quantized
from accelcheck.verify.oracle import Store
from accelcheck.verify.precision import FLOAT8_UNITS, MatrixUnit
from accelcheck.workloads.base import Problem, Program

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
SCALED: Any = named(TECHNIQUES, "float8-scaled-mm")
ROWWISE: Any = named(TECHNIQUES, "float8-scaled-mm-rowwise")
WEIGHTS: Any = named(TECHNIQUES, "float8-weight-only")


REFUSAL = "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"


def needs(technique: Quantized) -> None:
    """Skip if this torch's CPU kernels or the installed packages lack it."""
    answer = technique.answer(Bed())
    if not answer.ok:
        pytest.skip(str(answer))


def odd(*, bias: bool = True) -> Problem:
    """Two layers with sizes that are no multiples of a tile, an input of three dimensions, an activation between."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(77, 90, bias=bias), nn.Tanh(), nn.Linear(90, 47, bias=bias))
    return Problem(module, (torch.randn(3, 5, 77),))


@pytest.mark.parametrize("dtype", [E4M3, E5M2, FNUZ, torch.bfloat16, torch.float16])
def test_nearest_equals_the_cast(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    grid = (torch.arange(256, dtype=torch.uint8)).view(E4M3).float()
    ties = grid[grid.isfinite()] * (1 + 2.0**-4)
    x = torch.cat([drawn, ties, 2.0 ** torch.arange(-30.0, 8.0), torch.zeros(1)]).clamp(limits.min, limits.max)
    assert torch.equal(nearest(x, dtype), x.to(dtype).float())
    wide = x.double()
    assert torch.equal(nearest(wide, dtype), wide.float().to(dtype).double())


def test_flips_move_ties_to_a_neighbour_and_nothing_else() -> None:
    # Halfway between numbers of four significant bits, over eleven powers of two.
    ties = torch.cat([(torch.arange(8.0, 16.0) + 0.5) * 2.0**power for power in range(-8, 3)]).double()
    flipped = nearest(ties, E4M3, torch.Generator().manual_seed(0))
    spacing = 2.0 ** (torch.log2(ties).floor() - 3)
    assert torch.equal((flipped - ties).abs(), spacing / 2)
    assert 20 < int((flipped > ties).sum()) < 68
    clear = torch.tensor([1.0, 1.05, 1.07, -300.0, 2.0**-9]).double()
    assert torch.equal(nearest(clear, E4M3, torch.Generator().manual_seed(0)), nearest(clear, E4M3))


def test_a_tensor_of_zeros_has_a_scale() -> None:
    elements, scale = quantize(torch.zeros(4, 4), E4M3, rows=True)
    assert float(scale.min()) > 0
    assert float(elements.float().abs().sum()) == 0.0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_candidates_equal_the_emulation(technique: Any, bias: bool) -> None:
    needs(technique)
    ran = engaged(technique, odd(bias=bias))
    original = odd(bias=bias)
    exact, inputs = eval_copy(original.module).double(), (original.inputs[0].double(),)
    truth = technique.emulate(exact, inputs)(*inputs)
    error = float((ran.result["out"].double() - truth).norm() / truth.norm())
    assert error < 1e-6
    assert ran.result["out"].is_contiguous()
    assert float((truth - exact(*inputs)).norm() / truth.norm()) > 1e-3, "float8 must show against FP64"


def test_a_row_of_large_numbers_does_not_affect_other_rows() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 16)
    x = torch.randn(4, 32)
    x[0] *= 1e6
    needs(ROWWISE)
    apart = [
        float((Float8Linear(layer, E4M3, rows=rows)(x) - layer(x))[1:].norm() / layer(x)[1:].norm())
        for rows in (True, False)
    ]
    assert apart[0] < 0.1 < apart[1]


def every_layer(edit: Any) -> Change:
    def change(program: Program) -> None:
        assert isinstance(program.call, nn.Module)
        for layer in program.call.modules():
            if isinstance(layer, (Float8Linear, WidenedLinear)):
                edit(layer)

    return change


def doubled_scale(layer: Any) -> None:
    layer.scale.mul_(1.02)  # 1 % is within what one correct run of 10,000 shows in bfloat16


def wrong_axis(layer: Any) -> None:
    """Applies the scales of output channels along the inputs: a weight ``(N, K)`` times ``(1, K)``."""
    places = torch.arange(layer.weight.shape[1]) % len(layer.scale)
    layer.scale = layer.scale.flatten()[places].unsqueeze(0)


def truncated_inputs(layer: Any) -> None:
    """Truncates elements to four significant bits, so that the cast to float8 does not round them."""
    forward = layer.forward

    def cut(x: Tensor) -> Tensor:
        _, scale = quantize(x.reshape(-1, x.shape[-1]), E4M3, rows=layer.rows)
        out: Tensor = forward((truncated_to(4, x.float() / scale.max()) * scale.max()).to(x.dtype))
        return out

    layer.forward = cut


def other_format(layer: Any) -> None:
    """Keeps three significant bits in place of four."""
    layer.weight = layer.weight.float().to(E5M2).float().to(E4M3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "edit", [doubled_scale, truncated_inputs, other_format, None], ids=lambda edit: edit.__name__ if edit else "healthy"
)
def test_faults_of_scaled_products_are_caught(edit: Any, dtype: str, store: Store) -> None:
    needs(SCALED)
    change = nothing if edit is None else every_layer(edit)
    record = verdict_of(store, Planted(SCALED, change), seeded("mlp-blocks"), dtype=dtype)
    assert record.verdict is (Verdict.PASS if edit is None else Verdict.FAIL), record.why
    assert "not engaged" not in record.why


@pytest.mark.parametrize("edit", [wrong_axis, other_format, doubled_scale], ids=lambda edit: edit.__name__)
def test_faults_of_float8_weights_are_caught(edit: Any, store: Store) -> None:
    record = failed(store, Planted(WEIGHTS, every_layer(edit)), seeded("mlp"))
    assert "out: view" in record.why


def test_sums_of_14_bits_lose_what_is_smaller() -> None:
    hopper = FLOAT8_UNITS[9, 0]
    ones = torch.ones(64, 1, dtype=torch.float64)
    # 2**13 + 1 needs 14 bits, and 2**14 + 1 one more.
    assert float(summed(torch.tensor([[2.0**13] + [1.0] * 63]).double(), ones, hopper)) == 2**13 + 63
    assert float(summed(torch.tensor([[2.0**14] + [1.0] * 63]).double(), ones, hopper)) == 2**14
    assert float(summed(torch.tensor([[-(2.0**14)] + [-1.0] * 63]).double(), ones, hopper)) == -(2**14)  # toward zero
    # After 128 products the sum starts again, in FP32.
    ones = torch.ones(256, 1, dtype=torch.float64)
    late = torch.tensor([[2.0**14] + [0.0] * 127 + [1.0] * 128]).double()
    assert float(summed(late, ones, hopper)) == 2**14 + 128
    assert float(summed(late, ones, replace(hopper, promoted=0))) == 2**14 + 0
    assert float(summed(late, ones, FLOAT8_UNITS[10, 0])) == 2**14 + 128


def test_a_unit_that_keeps_all_bits_gives_the_product() -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(9, 70).to(E4M3).double() for _ in range(2))
    wide = MatrixUnit("wide", 60, 60, 32, 0)
    torch.testing.assert_close(summed(a, b.t(), wide), a @ b.t(), rtol=2.0**-23, atol=0.0)


@pytest.mark.parametrize(
    ("capability", "bits"), [((8, 9), 13), ((9, 0), 13), ((10, 0), 25), ((12, 0), 25), ((11, 7), None)]
)
def test_a_gpus_sums_are_those_of_its_chip(
    capability: tuple[int, int], bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    unit = float8.unit_of(StubDevice("cuda"))
    assert (None if unit is None else unit.fraction) == bits
    message = str(float8.sums(unit).observed)
    assert ("nothing else is known" in message) == (bits is None)
    assert float8.unit_of(StubDevice()) is None


def multiplied(unit: MatrixUnit) -> Any:
    """A `torch._scaled_mm` that adds up as a matrix unit."""

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any) -> Tensor:
        result = summed(a.float().double(), b.float().double(), unit)
        return (result * scale_a.double() * scale_b.double()).to(out_dtype)

    return product


HOPPER = FLOAT8_UNITS[9, 0]


@pytest.mark.parametrize(
    ("made", "held_to", "verdict"),
    [
        (HOPPER, HOPPER, Verdict.PASS),
        (replace(HOPPER, terms=16, promoted=0), HOPPER, Verdict.PASS),  # another kernel's choice
        (MatrixUnit("FP32", 40, 23, 32, 0), HOPPER, Verdict.PASS),
        (replace(HOPPER, fraction=8, kept=8), HOPPER, Verdict.FAIL),
        (HOPPER, None, Verdict.FAIL),  # a chip that should have more
        (FLOAT8_UNITS[10, 0], FLOAT8_UNITS[10, 0], Verdict.PASS),
        (HOPPER, FLOAT8_UNITS[10, 0], Verdict.FAIL),
    ],
)
@pytest.mark.parametrize("technique", [SCALED, ROWWISE], ids=lambda technique: technique.name)
@pytest.mark.parametrize("workload", ["mlp-blocks", "transformer-block"])
@pytest.mark.slow(after=3)
def test_a_product_is_held_to_the_sums_of_its_unit(
    workload: str,
    technique: Any,
    made: MatrixUnit,
    held_to: MatrixUnit | None,
    verdict: Verdict,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", multiplied(made))
    monkeypatch.setattr(float8, "unit_of", lambda _: held_to)
    monkeypatch.setattr(technique, "is_action", lambda _: True)  # nothing is dispatched here
    record = verdict_of(store, technique, seeded(workload))
    assert record.verdict is verdict, record.why
    assert "not engaged" not in record.why


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_an_unconverted_module_fails_the_evidence(technique: Any) -> None:
    program = Program.of(odd())
    program.call = eval_copy(program.module)
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    seen = list(technique.evidence(program, log, Mode.FORWARD, StubDevice()))
    assert sum(not call.engaged for call in seen) >= 4


def test_products_of_anything_but_float8_are_not_counted() -> None:
    needs(SCALED)
    program = Program.of(odd())
    SCALED.prepare(program, Mode.FORWARD, Bed())
    with SCALED.watch("cpu") as log:
        torch.randn(4, 4) @ torch.randn(4, 4)
    seen = {entry.claim: entry for entry in SCALED.evidence(program, log, Mode.FORWARD, Bed())}
    assert not seen["float8_e4m3fn products (aten::_scaled_mm) >= 2"].engaged


def test_evidence_shows_that_bytes_fall_to_a_quarter() -> None:
    problem = Problem(nn.Linear(64, 32), (torch.randn(4, 64),))
    ran = run(WEIGHTS, problem)
    claims = {entry.claim.partition(" fall")[0]: str(entry.observed) for entry in ran.evidence if "fall" in entry.claim}
    weights, scales, bias = 64 * 32, 4 * 32, 4 * 32
    assert claims["bytes of the weights"] == f"{4 * weights} -> {weights + scales}"
    assert claims["bytes of elements in a file"].startswith(f"{4 * weights + bias} -> {weights + scales + bias} (whole")


class Handing(StubDevice):
    """A device that falls back to the CPU."""

    def fallbacks(self) -> Mapping[str, int]:
        return {"aten::_scaled_mm": 1}


def test_capability_is_found_by_trial() -> None:
    needs(SCALED)
    assert SCALED.capability(StubDevice()).ok
    handing = SCALED.capability(Handing())
    assert (handing.code, handing.reason) == (Code.NO_FEATURE, "stub falls back to the CPU for aten::_scaled_mm")
    assert WEIGHTS.capability(Handing()).code is Code.NO_FEATURE


def test_a_device_that_raises_is_unsupported_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Mock(side_effect=RuntimeError(f"{REFUSAL}\nand a long trace")))
    answer = SCALED.capability(StubDevice())
    assert answer.code is Code.NO_FEATURE
    assert answer.tried
    assert answer.reason.endswith(REFUSAL)


@pytest.mark.parametrize(
    "text",
    [
        REFUSAL,
        "Only bf16 and fp16 high precision output types are supported for row-wise scaling.",
        "Cannot convert ScalarType Float8_e4m3fnuz to cudaDataType.",
        "Expected b.dtype() == at::kFloat8_e4m3fnuz, got: Float8_e4m3fn",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`",
        "Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that dtype.",
        "\"clamp\" not implemented for 'Float8_e4m3fn'",
        "Type not supported: Float8_e4m3fnuz",
        "itensor_view_from_dense expects float/bfloat16/half/int8/fp8 tensor inputFloat8_e4m3fnuz",
    ],
)
def test_what_torch_says_where_it_has_no_float8_is_a_refusal(text: str) -> None:
    assert float8._REFUSALS.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: operation not supported",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul(...)`",
        "mat1 and mat2 shapes cannot be multiplied (16x16 and 8x16)",
    ],
)
def test_any_other_error_of_a_product_is_raised(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Mock(side_effect=RuntimeError(text)))
    with pytest.raises(RuntimeError, match=re.escape(text)):
        SCALED.capability(StubDevice())


def test_a_device_that_multiplies_wrongly_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.zeros(a.shape[0], b.shape[1]))
    with pytest.raises(RuntimeError, match="expected 16, got"):
        SCALED.capability(StubDevice())


def test_a_gpu_without_float8_units_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Mock(side_effect=RuntimeError(REFUSAL)))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    answer = SCALED.capability(StubDevice("cuda"))
    assert (answer.code, answer.verdict) == (Code.NO_HARDWARE, Verdict.UNAVAILABLE)


def test_an_output_dtype_that_the_kernel_lacks_is_unsupported_in_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch._scaled_mm

    def picky(*given: Any, **more: Any) -> Tensor:
        if more["out_dtype"] is torch.float32:
            raise ValueError("Only bf16 high precision output types are supported for row-wise scaling.")
        return plain(*given, **more)

    needs(SCALED)
    monkeypatch.setattr(torch, "_scaled_mm", picky)
    assert SCALED.capability(StubDevice()).ok
    with pytest.raises(Unsupported, match="Only bf16 high precision"):
        SCALED.prepare(Program.of(odd()), Mode.FORWARD, StubDevice())
    SCALED.prepare(Program.of(odd(), dtype=torch.bfloat16), Mode.FORWARD, StubDevice())


def test_oracles_differ_by_format_and_scales() -> None:
    made: list[Quantized] = [*TECHNIQUES, *torchao.TECHNIQUES]  # type: ignore[list-item]  # all of these are
    oracles = [technique.oracle for technique in made if not technique.name.endswith("weight-only")]
    assert len(set(oracles)) == len(oracles)
    assert ScaledProduct("other", E5M2, rows=False).oracle not in oracles


AO = {technique.name: technique for technique in torchao.TECHNIQUES}


def test_torchaos_dynamic_float8_needs_a_gpu_and_equals_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    technique: Any = AO["float8-torchao-dynamic"]
    assert technique.capability(StubDevice()).code is Code.NO_FEATURE
    if not installed("torchao"):
        pytest.skip("torchao is not installed")
    # Without its check of the hardware, it runs with the CPU's kernels.
    api = importlib.import_module("torchao.quantization.quant_api")
    monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 10))
    x = torch.randn(6, 32)
    ran = engaged(technique, Problem(eval_copy(module), (x,)))
    assert ran.evidence[0].claim == "linear layers with a weight of type Float8Tensor = 1 >= 1"
    with torch.no_grad():
        truth = technique.emulate(eval_copy(module).double(), ())(x.double())
    assert float((ran.result["out"].double() - truth).norm() / truth.norm()) < 1e-6


def test_torchaos_weights_equal_those_of_the_plain_variant() -> None:
    technique: Any = AO["float8-torchao-weight-only"]
    needs(technique)
    assert technique.oracle == WEIGHTS.oracle
    first, other = run(technique, odd()), run(WEIGHTS, odd())
    assert first.engaged, first.missing()
    torch.testing.assert_close(first.result["out"], other.result["out"])


def test_float8_accepts_a_few_workloads() -> None:
    assert {"mlp", "digits-mlp"} <= float8.WORKLOADS
    assert all(technique.accepts(seeded("mlp")) for technique in TECHNIQUES)
    assert not any(technique.accepts(seeded("matmul")) for technique in TECHNIQUES)
