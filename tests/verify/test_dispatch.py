"""Operators in dispatch modes as they are called without one, and models with the fast path of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, passed, verdict_of
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults.plant import calling
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.observe import OperatorLog
from accelcheck.verify.global_state import GlobalState
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.dispatch import FUSED, layer_by_layer, unfused
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import workload_of

MASK = torch.arange(8) >= torch.tensor([[8], [5], [6], [3]])
"""Mask of sequences that are padded to 8 positions, ``(4, 8)``."""


def encoder(*, nested: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def workload(module: nn.Module | None = None, **keywords: Tensor) -> Workload:
    torch.manual_seed(1)
    return workload_of(module or encoder(), (torch.randn(4, 8, 16),), keywords)


def test_a_watched_kernel_that_calls_operators_is_autocast_as_it_is_without() -> None:
    module, x = encoder().eval(), torch.randn(4, 8, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = module(x)
        with OperatorLog("cpu") as log:
            watched = module(x)
    assert plain.dtype == watched.dtype == torch.bfloat16
    assert torch.equal(plain, watched)
    assert log.names()["aten::_transformer_encoder_layer_fwd"] == 2
    inner = log.having(lambda operator: operator.name == "aten::addmm" and operator.takes(torch.bfloat16))
    assert inner >= 2
    assert FUSED & log.names().keys()


def test_a_watched_kernel_takes_nested_and_fake_tensors() -> None:
    module, x = encoder(nested=True).eval(), torch.randn(4, 8, 16)
    with torch.no_grad(), OperatorLog("cpu"):
        watched = module(x, src_key_padding_mask=MASK)
    with torch.no_grad():
        assert torch.equal(watched, module(x, src_key_padding_mask=MASK))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, OperatorLog("cpu"):
            assert encoder().eval()(mode.from_tensor(x)).shape == x.shape


def test_a_watched_kernel_is_not_autocast_where_it_is_not_without() -> None:
    module, x = encoder().eval(), torch.randn(4, 8, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        plain = module(x)
        with OperatorLog("cpu"):
            assert torch.equal(plain, module(x))
    assert plain.dtype == torch.float32


def test_the_oracle_computes_encoder_layers_operator_by_operator() -> None:
    with torch.no_grad(), unfused(), OperatorLog("cpu") as log:
        encoder().eval().double()(torch.randn(4, 8, 16, dtype=torch.float64))
    assert not FUSED & log.names().keys()
    assert log.names()["aten::bmm"] == 4  # two of each layer


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("eager", FORWARD),
        ("eager", BACKWARD),
        ("amp-bf16", FORWARD),
        ("sdpa-math", FORWARD),
        ("flex-attention-eager", FORWARD),
        ("int4-weight-only", FORWARD),
        ("float8-weight-only", FORWARD),
    ],
)
@pytest.mark.parametrize("keywords", [{}, {"src_key_padding_mask": MASK}], ids=["whole", "padded"])
def test_encoder_layers_are_judged(name: str, mode: Mode, keywords: dict[str, Any], fresh: Store) -> None:
    passed(fresh, Matrix.load().techniques[name], workload(**keywords), mode)


@pytest.mark.slow
def test_an_autocast_that_a_compiled_encoder_layer_ignores_is_not_engaged(fresh: Store) -> None:
    record = failed(fresh, Matrix.load().techniques["compile-autocast-bf16"], workload(), FORWARD)
    assert "captured contractions in bfloat16" in record.why


def test_attention_within_a_layer_is_found() -> None:
    assert "attention" in workload().traits


def test_an_encoder_that_fills_paddings_with_zeros_is_named() -> None:
    with pytest.raises(OwnModelError, match="enable_nested_tensor=False"):
        workload(encoder(nested=True), src_key_padding_mask=MASK)
    assert workload(encoder(nested=True)).given  # nothing is padded


class LimitsAsked(nn.Module):
    """Layer that masks by the smallest number of its dtype, and divides by a norm and its dtype's eps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        limits = torch.finfo(x.dtype)
        return self.ended(x, limits.min, limits.eps)

    def ended(self, x: Tensor, least: float, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        scores = self.linear(x)
        small = scores * 1e-4
        hidden = torch.eye(6, dtype=torch.bool, device=x.device)
        return (scores * scale).masked_fill(hidden, least), small / (small.norm(dim=-1, keepdim=True) + eps)


def test_limits_that_a_model_asks_its_dtype_for_are_those_of_its_storage(fresh: Store) -> None:
    torch.manual_seed(0)
    workload = workload_of(LimitsAsked(), (torch.randn(6, 6),), name="limits")
    own = torch.finfo(torch.float32)
    for mode in (FORWARD, BACKWARD):
        passed(fresh, Eager(), workload, mode)
    for other in ((own.min / 2, own.eps), (own.min, torch.finfo(torch.float64).eps), (own.min, own.eps, 1.001)):
        failed(fresh, Planted(calling(lambda module, x, o=other: module.ended(x, *o))), workload, FORWARD)
    assert isinstance(own, torch.finfo)


def test_a_fast_path_that_is_left_switched_off_is_named() -> None:
    state = GlobalState.now()
    torch.backends.mha.set_fastpath_enabled(False)
    assert "fast path of attention" in " ".join(map(str, state.restore()))
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_fast_path_is_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), layer_by_layer():
        raise ZeroDivisionError
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("name", ["func-jacrev", "func-jacfwd"])
def test_a_jacobian_that_is_too_large_is_unsupported(name: str, fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.techniques.autograd.functional.MOST_ELEMENTS", 10**6)
    record = verdict_of(fresh, Matrix.load().techniques[name], workload(), BACKWARD)
    assert record.verdict is Verdict.UNSUPPORTED
    assert "[too-large] the whole Jacobian has 512 x 4,960 elements" in record.why


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("shapes", "grouped"),
    [
        (((24, 16), (3, 16, 32)), True),
        (((3, 16, 32), (32, 24)), True),
        (((16, 24), (24, 32)), True),
        (((3, 16, 32), (3, 32, 16)), False),
    ],
    ids=["rows", "columns", "inner parts", "batches"],
)
def test_the_oracle_multiplies_groups_in_float64_as_torch_does_in_float32(shapes: Any, grouped: bool) -> None:
    operands = [drawn(*shape) for shape in shapes]
    words: Any = {"offs": torch.tensor([8, 8, 24], dtype=torch.int32)} if grouped else {}
    theirs = [x.clone().requires_grad_() for x in operands]
    ours = [x.double().requires_grad_() for x in operands]
    out = torch.nn.functional.grouped_mm(*theirs, **words)
    weight = drawn(*out.shape)
    torch.autograd.backward([out], [weight])
    with unfused():
        again = torch.nn.functional.grouped_mm(*ours, **words)
        assert torch.nn.functional.grouped_mm is torch._grouped_mm
    torch.autograd.backward([again], [weight.double()])
    torch.testing.assert_close(out.double(), again, rtol=1e-5, atol=1e-5)
    for theirs_one, ours_one in zip(theirs, ours, strict=True):
        assert theirs_one.grad is not None
        assert ours_one.grad is not None
        torch.testing.assert_close(theirs_one.grad.double(), ours_one.grad, rtol=1e-5, atol=1e-5)
    assert torch.nn.functional.grouped_mm is not torch._grouped_mm


class Experts(nn.Module):
    """A router of four experts, and a matrix for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(16, 4, bias=False), nn.Parameter(torch.randn(4, 16, 16) * 0.25)


class Routed(Experts):
    """Tokens to two experts by a grouped product, with counts as libraries make them: a histogram of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        ends = torch.histc(chosen.flatten().float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        rows = torch.nn.functional.grouped_mm(x.repeat_interleave(2, 0)[order], self.experts, offs=ends)
        out: Tensor = (rows[order.argsort()].view(-1, 2, 16) * weight.unsqueeze(-1)).sum(1)
        return out


class Capacity(Experts):
    """Tokens to one expert each, of which those after the third are dropped: positions are sums of a mask."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        mask = torch.nn.functional.one_hot(chosen, 4).to(x.dtype)
        place = mask.cumsum(0) * mask
        kept = mask * (place <= 3)
        slots = torch.nn.functional.one_hot((place.sum(-1).long() - 1).clamp(max=2), 3).to(x.dtype)
        sent = torch.einsum("te,ts->tes", kept, slots)
        out = torch.einsum("tes,esw->tw", sent, torch.bmm(torch.einsum("tes,tw->esw", sent, x), self.experts))
        scaled: Tensor = out * weight.unsqueeze(-1)
        return scaled


class Last(Experts):
    """The last token of each row, by the sum of a mask of floating-point numbers, which is an input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = torch.tanh(x @ self.experts[0])[torch.arange(len(x)), mask.sum(1).long() - 1]
        return out


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Routed(), (drawn(16, 16),)),
        (Capacity(), (drawn(16, 16),)),
        (Last(), (drawn(5, 9, 16), (torch.arange(9) < torch.tensor([[9], [1], [4], [7], [2]])).float())),
    ],
    ids=["routed", "capacity", "last"],
)
def test_models_that_count_their_tokens_are_judged(model: Any, inputs: Any, mode: Mode, fresh: Store) -> None:
    workload = workload_of(model, inputs)
    passed(fresh, Eager(), workload, mode)
    failed(fresh, Planted(calling(lambda module, *given: module(*given) * 1.00001)), workload, mode)
