from __future__ import annotations

import pytest
import torch
from technique_harness import MODES, StubDevice, agrees, engaged, named, run, trained, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.layout.formats import TECHNIQUES
from accelcheck.techniques.observe import memory_format
from accelcheck.workloads.base import Problem

CHANNELS_LAST = named(TECHNIQUES, "channels-last")
CONTIGUOUS = named(TECHNIQUES, "contiguous")


def convolutions() -> Problem:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    return trained(module, torch.randn(2, 3, 11, 9), torch.randn(2, 4, 4, 3))


@pytest.mark.parametrize("mode", MODES)
def test_channels_last_reaches_the_convolutions(mode: Mode) -> None:
    agrees(CHANNELS_LAST, convolutions, mode)


def test_channels_last_outputs() -> None:
    ran = run(CHANNELS_LAST, convolutions())
    assert memory_format(ran.result["out"]) == "channels_last"


def test_a_convolution_that_loses_the_format_fails_the_evidence() -> None:
    class Undoing(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Conv2d gives it
            return nn.functional.conv2d(input.contiguous(), self.weight.contiguous(), self.bias)

    ran = run(CHANNELS_LAST, Problem(Undoing(3, 8, 3), (torch.randn(2, 3, 8, 8),)))
    assert [entry.engaged for entry in ran.evidence] == [False, False]


def test_convolutions_of_signals_and_kernels_of_one_element_keep_no_format() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.point, self.signal = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv1d(4, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.signal(self.point(self.image(x).contiguous()).flatten(2))
            return out

    engaged(CHANNELS_LAST, Problem(Mixed(), (torch.randn(2, 3, 8, 8),)))


def test_channels_last_changes_no_kernel_of_one_element() -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.point = nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.point(x[..., None])
            return out

    with pytest.raises(Unsupported, match="kernels of one element have both formats") as caught:
        run(CHANNELS_LAST, Problem(Points(), (torch.randn(2, 6, 8),)))
    assert caught.value.capability.code is Code.NO_EFFECT


class Turned(nn.Module):
    """A linear layer on a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.transpose(-1, -2))
        return out


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_tensors_between_modules_are_made_contiguous(mode: Mode) -> None:
    def problem() -> Problem:
        torch.manual_seed(0)
        return Problem(Turned(), (torch.randn(3, 6, 5),))

    ran = agrees(CONTIGUOUS, problem, mode)
    assert ran.evidence[0].observed == 1


def test_inputs_are_made_contiguous() -> None:
    problem = Problem(nn.ReLU(), (torch.randn(4, 3).t(),))
    ran = engaged(CONTIGUOUS, problem)
    assert ran.result["out"].is_contiguous()
    assert torch.equal(ran.result["out"], problem.inputs[0].relu())


def test_contiguous_tensors_give_no_effect() -> None:
    with pytest.raises(Unsupported) as caught:
        run(CONTIGUOUS, Problem(nn.ReLU(), (torch.randn(3, 4),)))
    assert caught.value.capability.code is Code.NO_EFFECT


def test_it_needs_a_device_with_strides() -> None:
    assert all(technique.capability(StubDevice(features=())).code is Code.NO_FEATURE for technique in TECHNIQUES)
    assert all(technique.capability(StubDevice()).ok for technique in TECHNIQUES)
    assert not CHANNELS_LAST.accepts(workload("linear"))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3, 4, 5), "contiguous"),
        (torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "channels_last"),
        (torch.empty(2, 1, 4, 5), "both"),
        (torch.empty(2, 3, 4, 5).transpose(0, 3), "strided"),
        (torch.empty(4, 5), ""),
    ],
)
def test_memory_format(tensor: Tensor, expected: str) -> None:
    assert memory_format(tensor) == expected
