from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from technique_harness import StubDevice, differences, engaged, named, plain, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.layout.views import MARGIN, TECHNIQUES
from accelcheck.workloads.base import Problem


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, index: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * keep, x.gather(1, index)


def problem() -> Problem:
    torch.manual_seed(0)
    index = torch.randint(0, 6, (5, 3))
    return Problem(Mixed(), (torch.randn(5, 6), index, torch.rand(5, 4) < 0.5))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_do_not_depend_on_strides(technique: Any, mode: Mode, dtype: torch.dtype) -> None:
    ran = engaged(technique, problem(), mode, dtype=dtype)
    assert not differences(ran.result, plain(problem(), mode, dtype), 1e-5 if dtype is torch.float32 else 1e-2)
    assert all(
        torch.equal(a.to(b.dtype), b)
        for a, b in zip(ran.program.inputs, problem().inputs, strict=True)
        if not b.is_floating_point()
    )


@pytest.mark.parametrize(
    ("name", "stride"),
    [("transposed", (1, 5, 20)), ("sliced", (24, 6, 2)), ("padded", (24, 6, 1)), ("offset", (12, 3, 1))],
)
def test_strides_of_each_view(name: str, stride: tuple[int, ...]) -> None:
    ran = run(named(TECHNIQUES, f"view-{name}"), Problem(nn.ReLU(), (torch.randn(5, 4, 3),)))
    (value,) = ran.program.inputs
    assert value.stride() == stride
    assert value.storage_offset() == MARGIN
    assert value.untyped_storage().nbytes() // 4 >= value.numel() + 2 * MARGIN


def touching(edit: Callable[[Tensor], object]) -> nn.Module:
    """A module that reads or writes beyond its input."""

    class Touching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            # Through the storage, as a wrong kernel would.
            edit(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()))
            return x * 2

    return Touching()


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_write_around_the_view_fails_the_evidence(technique: Any) -> None:
    ran = run(technique, Problem(touching(lambda base: base[MARGIN - 1].fill_(0)), (torch.randn(5, 4),)))
    assert ran.missing() == ["inputs around which memory was written = none: 0"]


@pytest.mark.parametrize("name", ["view-sliced", "view-padded"])
def test_a_write_between_the_elements_fails_the_evidence(name: str) -> None:
    past = {"view-sliced": MARGIN + 1, "view-padded": MARGIN + 4}[name]
    ran = run(named(TECHNIQUES, name), Problem(touching(lambda base: base[past].fill_(0)), (torch.randn(5, 4),)))
    assert not ran.engaged


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_kernel_that_ignores_strides_reads_poison(technique: Any) -> None:
    class Ignoring(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty(0).set_(x.untyped_storage())[: x.numel()].reshape(x.shape) * 1

    ran = run(technique, Problem(Ignoring(), (torch.randn(5, 4),)))
    assert bool(ran.result["out"].isnan().any())


@pytest.mark.parametrize("value", [torch.empty(0, 3), 3])
def test_inputs_without_a_view_give_no_effect(value: Tensor | int) -> None:
    class Constant(nn.Module):
        def forward(self, _: Tensor | int) -> Tensor:
            return torch.ones(2)

    for technique in TECHNIQUES:
        with pytest.raises(Unsupported) as caught:
            run(technique, Problem(Constant(), (value,)))
        assert caught.value.capability.code is Code.NO_EFFECT


def test_only_an_offset_exists_for_one_element() -> None:
    single = Problem(nn.ReLU(), (torch.ones(1, 1),))
    assert run(named(TECHNIQUES, "view-offset"), single).engaged
    with pytest.raises(Unsupported):
        run(named(TECHNIQUES, "view-transposed"), single)


def test_it_needs_a_device_with_strides() -> None:
    assert all(technique.capability(StubDevice(features=())).code is Code.NO_FEATURE for technique in TECHNIQUES)
