from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fault_harness import Bed, failed, seeded, verdict_of
from technique_harness import Attention, StubDevice, agrees, named, run, workload
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.techniques.attention import flex
from accelcheck.techniques.attention.flex import TECHNIQUES
from accelcheck.techniques.attention.intercept import Call
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program

EAGER = named(TECHNIQUES, "flex-attention-eager")
COMPILED = named(TECHNIQUES, "flex-attention")


def problem(mask: Tensor | None = None, queries: int = 9, keys: int = 9, heads: int = 4, **options: Any) -> Problem:
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, queries, 16), torch.randn(2, heads, keys, 16), torch.randn(2, heads, keys, 16)
    return Problem(Attention(**options), inputs if mask is None else (*inputs, mask))


def empty_row() -> Tensor:
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    mask[0, :, 3] = False
    return mask


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("made", "options"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        (None, {"scale": 0.5}),
        (None, {"heads": 2, "enable_gqa": True}),
        (None, {"queries": 5, "keys": 12, "is_causal": True}),
        (empty_row, {}),
        (lambda: torch.arange(81.0).reshape(9, 9).sin(), {}),
        (lambda: (torch.arange(9) < 4).view(1, 1, 1, 9), {}),
    ],
    ids=["full", "causal", "scale", "grouped", "causal-cross", "empty-row", "bias", "keys"],
)
def test_every_kind_of_call_equals_torchs_attention(made: Any, options: dict[str, Any]) -> None:
    mask = None if made is None else made()
    agrees(EAGER, lambda: problem(mask, **options))


@pytest.mark.slow
def test_the_compiled_kernel_equals_torchs_attention() -> None:
    agrees(COMPILED, lambda: problem(empty_row()))


def test_a_run_without_calls_fails_the_evidence() -> None:
    for technique in TECHNIQUES:
        ran = run(technique, Problem(nn.ReLU(), (torch.randn(3),)))
        assert any("calls of flex_attention" in line for line in ran.missing())


def test_a_run_of_torchs_own_attention_fails_the_evidence() -> None:
    class Stubborn(type(EAGER)):  # type: ignore[misc]  # the class of an instance
        def prepare(self, program: Program, mode: Mode, device: Any) -> None:
            super().prepare(program, mode, device)
            program.call = program.module
            program.around = lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
            program.extras["attention calls"] = 1

    ran = run(Stubborn(), problem())
    assert [line.partition(":")[0] for line in ran.missing()] == ["torch's own attention dispatched = 0"]


def test_a_backward_pass_on_the_cpu_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*args: Any, **options: Any) -> Tensor:
        raise NotImplementedError("FlexAttention does not support backward on CPU. Please do something else.")

    monkeypatch.setattr(flex, "flex_attention", refusing)
    with pytest.raises(Unsupported, match=r"does not support backward on CPU$") as caught:
        run(EAGER, problem(), Mode.BACKWARD)
    assert caught.value.capability.code is Code.NO_FEATURE


def test_the_compiled_backward_of_an_older_torch_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(Unsupported, match="no backward"):
        run(COMPILED, problem(), Mode.BACKWARD)


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "flex_attention", Mock(side_effect=ValueError("planted")))
    with pytest.raises(ValueError, match="planted"):
        run(EAGER, problem())


def test_dropout_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no dropout"):
        flex.attend(flex_attention, Call(torch.ones(1), torch.ones(1), torch.ones(1), dropout_p=0.5))
    assert Mode.RANDOM not in EAGER.modes | COMPILED.modes


def test_capability_by_device() -> None:
    for kind in ("xla", "tpu", "vendor"):
        assert EAGER.capability(StubDevice(kind)).code is Code.NO_BACKEND
        assert COMPILED.capability(StubDevice(kind)).code is Code.NO_BACKEND
    for kind in ("cpu", "cuda", "xpu"):
        assert EAGER.capability(StubDevice(kind)).ok
        assert COMPILED.capability(StubDevice(kind)).code is Code.NO_BACKEND  # without inductor
    assert EAGER.accepts(workload("attention"))
    assert not EAGER.accepts(workload("linear"))


@pytest.mark.slow
def test_a_mask_function_that_is_off_by_one_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, place = Store(tmp_path), seeded("attention-causal")
    assert Bed().type == "cpu"
    assert verdict_of(store, EAGER, place).verdict is Verdict.PASS

    def shifted(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + 1 >= key

    monkeypatch.setattr(flex, "causal", shifted)
    record = failed(store, EAGER, place)
    assert "view row" in record.why
