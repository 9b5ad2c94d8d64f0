from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from fault_harness import seeded, verdict_of
from technique_harness import StubDevice, differences, mlp, named, plain, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.techniques.interop import numpy_matmul
from accelcheck.techniques.interop.numpy_matmul import COMPUTED, TECHNIQUES
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

NUMPY = named(TECHNIQUES, "matmul-numpy")


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN])
def test_numpy_computes_products_forward_and_backward(mode: Mode) -> None:
    ran = run(NUMPY, mlp(), mode)
    assert ran.engaged, ran.missing()
    assert not differences(ran.result, plain(mlp(), mode))
    # Two layers; in the backward pass, each has a gradient of its weight and of its input.
    assert ran.program.extras[COMPUTED].total() == {Mode.FORWARD: 2, Mode.BACKWARD: 6, Mode.TRAIN: 15}[mode]


class Each(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def numbers(*sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(size) for size in sizes)


@pytest.mark.parametrize(
    ("function", "sizes", "operator"),
    [
        (torch.mm, ((3, 4), (4, 5)), "aten::mm"),
        (torch.bmm, ((2, 3, 4), (2, 4, 5)), "aten::bmm"),
        (torch.mv, ((3, 4), (4,)), "aten::mv"),
        (torch.dot, ((4,), (4,)), "aten::dot"),
        (torch.vdot, ((4,), (4,)), "aten::vdot"),
        (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0), ((5,), (3, 4), (4, 5)), "aten::addmm"),
        (lambda b, x, y: torch.addmv(b, x, y, alpha=2.0), ((3,), (3, 4), (4,)), "aten::addmv"),
        (lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5), ((2, 3, 5), (2, 3, 4), (2, 4, 5)), "aten::baddbmm"),
        (torch.addbmm, ((3, 5), (2, 3, 4), (2, 4, 5)), "aten::addbmm"),
    ],
)
def test_every_operator(function: Callable[..., Tensor], sizes: Any, operator: str) -> None:
    made = numbers(*sizes)
    ran = run(NUMPY, Problem(Each(function), made))
    assert ran.program.extras[COMPUTED][operator] == 1
    assert not differences(ran.result, plain(Problem(Each(function), made)))


def test_a_bias_times_zero_is_not_read() -> None:
    def function(bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.addmm(bias, x, y, beta=0.0)

    made = torch.full((3, 5), float("nan")), *numbers((3, 4), (4, 5))
    assert bool(run(NUMPY, Problem(Each(function), made)).result["out"].isfinite().all())


def test_a_product_by_torch_fails_the_evidence() -> None:
    out = torch.empty(3, 5)
    ran = run(NUMPY, Problem(Each(lambda x, y: torch.mm(x, y, out=out) + x @ y), numbers((3, 4), (4, 5))))
    assert [line.partition(" =")[0] for line in ran.missing()] == ["contractions by torch"]


def test_a_run_without_products_fails_the_evidence() -> None:
    assert run(NUMPY, Problem(nn.ReLU(), numbers((3, 4)))).missing() == ["contractions by NumPy >= 1: 0"]


def test_capability_by_device() -> None:
    assert NUMPY.answer(StubDevice("cpu")).ok
    for kind in ("cuda", "xla", "tpu", "vendor"):
        assert NUMPY.answer(StubDevice(kind)).code is Code.NO_FEATURE
    assert all(NUMPY.accepts(seeded(name)) for name in numpy_matmul.WORKLOADS)
    assert not NUMPY.accepts(seeded("attention-causal"))


def test_a_wrong_product_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, place = Store(tmp_path), seeded("matmul")
    assert verdict_of(store, NUMPY, place).verdict is Verdict.PASS

    def halved(left: Any, right: Any) -> Any:
        return (left.astype(np.float16) @ right.astype(np.float16)).astype(left.dtype)

    monkeypatch.setitem(numpy_matmul.PRODUCTS, "aten::mm", halved)
    assert verdict_of(store, NUMPY, place).verdict is Verdict.FAIL
