from __future__ import annotations

import pytest
import torch
from technique_harness import MODES, StubDevice, engaged, mlp, named, run, workload

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.devices.strict import read_state
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.precision.matmul import TECHNIQUES as ALL
from accelcheck.techniques.precision.matmul import (
    ConvolutionPrecision,
    MatmulPrecision,
    ReducedPrecision,
    convolution_error,
    convolution_mode,
    matmul_mode,
)

TECHNIQUES = [technique for technique in ALL if isinstance(technique, ReducedPrecision)]
MATMUL = [technique for technique in TECHNIQUES if isinstance(technique, MatmulPrecision)]


def obeying() -> StubDevice:
    """A device whose matmul has the error of TF32 whenever the mode allows it."""
    return StubDevice(error=lambda: 0.0 if torch.get_float32_matmul_precision() == "highest" else 2.0**-11)


@pytest.mark.parametrize("technique", MATMUL, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", MODES)
def test_the_mode_is_on_during_the_whole_run_only(technique: MatmulPrecision, mode: Mode) -> None:
    words: set[str] = set()
    problem = mlp()
    problem.module.register_forward_hook(lambda *_: words.add(torch.get_float32_matmul_precision()))
    problem.module.register_full_backward_pre_hook(lambda *_: words.add(torch.get_float32_matmul_precision()))
    before = read_state()
    engaged(technique, problem, mode, obeying())
    assert words == {technique.wanted}
    assert read_state() == before


@pytest.mark.parametrize("technique", MATMUL, ids=lambda technique: technique.name)
def test_capability_is_measured(technique: MatmulPrecision) -> None:
    assert technique.measured(obeying()).ok
    answer = technique.measured(StubDevice(error=lambda: 0.0))
    assert answer.code is Code.NO_EFFECT
    assert "relative error 0 with it" in answer.reason
    # Inexact with and without the mode: the mode has no effect.
    assert technique.measured(StubDevice(error=lambda: 2.0**-9)).code is Code.NO_EFFECT


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_device_with_another_setting_is_unsupported(technique: ReducedPrecision) -> None:
    def asked() -> float:
        raise AssertionError("asked")

    assert technique.capability(StubDevice("xla", error=asked)).code is Code.NO_BACKEND
    assert technique.capability(StubDevice("cuda", error=asked)).ok


def test_a_failed_run_restores_the_mode() -> None:
    problem = mlp()

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    problem.module.register_forward_hook(fail)
    before = read_state()
    with pytest.raises(RuntimeError, match="planted"):
        run(named(TECHNIQUES, "matmul-tf32"), problem, device=obeying())
    assert read_state() == before


def test_without_an_effect_it_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="changes nothing on stub"):
        run(named(TECHNIQUES, "matmul-bf16"), mlp(), device=StubDevice(error=lambda: 0.0))


def test_states_that_torch_cannot_read_are_kept() -> None:
    before = read_state()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        mixed = read_state()
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        with matmul_mode("medium"):
            assert torch.get_float32_matmul_precision() == "medium"
        with convolution_mode("tf32"):
            assert torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]  # set at import
        assert read_state() == mixed
    finally:
        torch.backends.cuda.matmul.fp32_precision = before.rows[2]
    assert read_state() == before


def test_convolution_in_float32_is_exact() -> None:
    with convolution_mode("ieee"):
        assert convolution_error(torch.device("cpu")) == 0


def test_convolution_error_shows_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.functional.conv2d

    def rounded(given: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
        return original(given.round(), weight, padding=padding)  # 1024.5 to 11 significant bits

    monkeypatch.setattr(torch.nn.functional, "conv2d", rounded)
    assert convolution_error(torch.device("cpu")) == pytest.approx(2.0**-11, rel=1e-2)


def test_precisions_and_workloads() -> None:
    assert [technique.precision("float32") for technique in TECHNIQUES] == ["tf32", "bfloat16", "tf32"]
    convolution = named(TECHNIQUES, "conv-tf32")
    assert isinstance(convolution, ConvolutionPrecision)
    assert convolution.accepts(workload("conv"))
    assert not convolution.accepts(workload("linear"))
    assert all(technique.accepts(workload("attention")) for technique in MATMUL)
    assert not any(technique.accepts(workload("conv")) for technique in MATMUL)
