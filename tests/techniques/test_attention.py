from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from technique_harness import Attention, StubDevice, agrees, named, run, seen, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.attention.sdpa import TECHNIQUES
from accelcheck.techniques.base import Unsupported
from accelcheck.workloads.base import Problem, Program

MATH = named(TECHNIQUES, "sdpa-math")
FLASH = named(TECHNIQUES, "sdpa-flash")
EFFICIENT = named(TECHNIQUES, "sdpa-efficient")
CUDNN = named(TECHNIQUES, "sdpa-cudnn")


def problem(mask: Tensor | None = None, head: int = 16, **options: Any) -> Problem:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, head)
    return Problem(Attention(**options), (q, k, v) if mask is None else (q, k, v, mask))


@pytest.mark.parametrize("technique", [MATH, FLASH], ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("dtype", MATH.dtypes)
def test_only_the_forced_backend_runs(technique: Any, mode: Mode, dtype: str) -> None:
    stored: torch.dtype = getattr(torch, dtype)
    tolerance = 1e-5 if stored is torch.float32 else 0.05
    agrees(technique, lambda: problem(is_causal=True), mode, dtype=stored, tolerance=tolerance)


@pytest.mark.parametrize("mask", [torch.ones(9, 9, dtype=torch.bool).tril(), torch.ones(2, 1, 9, 9, dtype=torch.bool)])
def test_cpu_flash_takes_masks(mask: Tensor) -> None:
    assert run(FLASH, problem(mask)).engaged


def test_a_refusal_is_unsupported_with_torchs_reason() -> None:
    with pytest.warns(UserWarning, match="last dimension"), pytest.raises(Unsupported) as caught:
        run(FLASH, problem(head=8))
    answer = caught.value.capability
    assert answer.code is Code.NO_BACKEND
    assert "same last dimension" in answer.reason
    assert "because:" not in answer.reason


def test_a_refused_dtype_has_its_own_code() -> None:
    class Refusing(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            warnings.warn("Expected query, key and value to all be of dtype: {Half, BFloat16}.", stacklevel=1)
            raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.warns(UserWarning, match="dtype"), pytest.raises(Unsupported) as caught:
        run(FLASH, Problem(Refusing(), (torch.randn(2, 2),)))
    assert caught.value.capability.code is Code.NO_DTYPE


def test_other_errors_are_raised() -> None:
    class Broken(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        run(FLASH, Problem(Broken(), (torch.randn(2, 2),)))


def test_capability_by_device() -> None:
    assert {t.name for t in TECHNIQUES if t.capability(StubDevice("cpu")).ok} == {"sdpa-math", "sdpa-flash"}
    assert {t.name for t in TECHNIQUES if t.capability(StubDevice("xla")).ok} == {"sdpa-math"}
    assert CUDNN.capability(StubDevice("cpu")).code is Code.NO_BACKEND
    assert not MATH.accepts(workload("linear"))


def test_capability_on_cuda_depends_on_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StubDevice("cuda")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert FLASH.capability(device).code is Code.WRONG_BUILD
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert all(technique.capability(device).ok for technique in TECHNIQUES)
    device.features |= {"hip"}
    assert CUDNN.capability(device).code is Code.NO_BACKEND
    assert EFFICIENT.capability(device).ok


@pytest.mark.parametrize(
    ("technique", "operator"),
    [
        (FLASH, "aten::_scaled_dot_product_flash_attention"),
        (EFFICIENT, "aten::_scaled_dot_product_efficient_attention"),
        (CUDNN, "aten::_scaled_dot_product_cudnn_attention"),
        (MATH, "aten::_safe_softmax"),
    ],
)
def test_cuda_evidence(technique: Any, operator: str) -> None:
    def engaged(*operators: str) -> bool:
        log = seen("cuda", *operators)
        evidence = technique.evidence(Program.of(problem()), log, Mode.FORWARD, StubDevice("cuda"))
        return all(entry.engaged for entry in evidence)

    assert engaged("aten::mm", operator)
    assert engaged(operator, "aten::_scaled_dot_product_flash_attention_backward")
    assert not engaged("aten::mm")
    other = "aten::_safe_softmax" if technique is not MATH else "aten::_scaled_dot_product_flash_attention"
    assert not engaged(operator, other)
