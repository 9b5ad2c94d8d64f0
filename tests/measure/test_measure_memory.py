"""Peaks of memory: figures worked out by hand, to the byte; statistics where a device has them; reasons where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from technique_harness import StubDevice
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.devices.base import Memory
from accelcheck.measure.memory import measurable, peak

MIB = 1 << 20
CPU = StubDevice()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(MIB // 4)  # FP32: one MiB


def test_out_of_place_takes_the_result_and_in_place_nothing(x: torch.Tensor) -> None:
    assert peak(CPU, lambda: torch.relu(x)).bytes == MIB
    assert peak(CPU, lambda: torch.relu_(x)).bytes == 0


def test_of_a_chain_two_results_live_at_once_and_in_place_one(x: torch.Tensor) -> None:
    assert peak(CPU, lambda: x.relu().relu().relu()).bytes == 2 * MIB
    assert peak(CPU, lambda: x.relu().relu_().relu_()).bytes == MIB


def layers() -> tuple[nn.Module, torch.Tensor]:
    """Weights of 256 KiB, activations of 64 KiB."""
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))), torch.randn(64, 256)


def test_layers_without_gradients_take_what_goes_in_and_what_comes_out() -> None:
    module, z = layers()
    with torch.no_grad():
        # The third layer's: the second's output and its own, for nothing else holds the first's.
        assert peak(CPU, lambda: module(z)).bytes == 2 * 64 * 1024


def test_layers_with_gradients_end_with_those_of_all_weights() -> None:
    module, z = layers()

    def run() -> None:
        module.zero_grad(set_to_none=True)
        out = module(z)
        out.sum().backward()

    # As the last weight's gradient is made: four of them, the gradient that goes into the first layer, the output
    # (which `run` holds), the loss, and its gradient.
    expected = 4 * 256 * 1024 + 2 * 64 * 1024 + 4 + 4
    # Each run releases the gradients of the one before, which the profiler saw come: they are none of its own.
    assert [peak(CPU, run).bytes for _ in range(3)] == [expected] * 3


def test_what_the_run_returns_is_live_until_it_ends(x: torch.Tensor) -> None:
    assert peak(CPU, lambda: [x.relu() for _ in range(5)]).bytes == 5 * MIB


class Statistics(StubDevice):
    def __init__(self, *answers: Memory) -> None:
        super().__init__("fancy")
        self.told = list(answers)
        self.done: list[str] = []

    def memory(self) -> Memory:
        self.done.append("memory")
        return self.told.pop(0)

    def reset_memory(self) -> None:
        self.done.append("reset")

    def synchronize(self) -> None:
        self.done.append("synchronize")


def noting(device: Statistics) -> Callable[[], None]:
    return lambda: device.done.append("run")


def test_statistics_are_read_around_the_run_when_all_work_is_done() -> None:
    device = Statistics(Memory(0, 0), Memory(100, 900), Memory(120, 350))
    assert peak(device, noting(device)).bytes == 250
    assert device.done == ["memory", "synchronize", "reset", "memory", "run", "synchronize", "memory"]


def test_without_statistics_there_is_a_reason_no_number_and_no_run() -> None:
    for answer in (Memory(None, None, "it counts nothing"), Memory(5, None, "it counts nothing")):
        device = Statistics(answer, answer)
        result = peak(device, noting(device))
        assert (result.bytes, result.reason) == (None, "it counts nothing")
        assert "run" not in device.done
        assert measurable(device).code is Code.NO_FEATURE
    assert measurable(CPU).ok
    assert "stub offers no memory statistics" in str(measurable(StubDevice("fancy")))


def test_statistics_that_vanish_are_an_error() -> None:
    device = Statistics(Memory(0, 0), Memory(0, 0), Memory(None, None, "lost"))
    with pytest.raises(RuntimeError, match="expected memory statistics"):
        peak(device, noting(device))
