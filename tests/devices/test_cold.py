"""Times on a GPU are those of kernels in cold caches, not of the host that launches them. On a simulated GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelcheck.devices.cuda import Cuda
from accelcheck.measure.clocks import block

LAUNCH = 10e-6
"""Seconds that the host takes to launch a kernel of an eager operator."""
QUEUED = 1024
"""Launches that wait on a stream; a further one blocks the host."""


class SimulatedGpu:
    """A host and a GPU with a stream between them: kernels start when both the launch and the kernel before are done.

    Attributes:
        host: Seconds of the host's clock.
        end: When the last launched kernel ends.
        flushed: Bytes that `zero_` wrote in each call of it.
    """

    def __init__(self) -> None:
        self.host = 0.0
        self.end = 0.0
        self.flushed: list[int] = []
        self._queue: deque[float] = deque()

    def launch(self, seconds: float, cost: float = LAUNCH) -> None:
        """Launch a kernel that runs so long."""
        self.host += cost
        while self._queue and self._queue[0] <= self.host:
            self._queue.popleft()
        if len(self._queue) >= QUEUED:
            self.host = self._queue.popleft()
        self.end = max(self.end, self.host) + seconds
        self._queue.append(self.end)

    def synchronize(self) -> None:
        self.host = max(self.host, self.end)

    def zeros(self, size: int) -> Any:
        def zero_() -> None:
            self.flushed.append(size)
            self.launch(size / 3.3e12)  # bytes a second that an H200 writes

        return SimpleNamespace(zero_=zero_)

    def event(self, **settings: bool) -> Any:
        assert settings == {"enable_timing": True}
        now = SimpleNamespace(at=0.0)

        def record() -> None:
            self.host += 1e-6
            now.at = max(self.end, self.host)

        now.record = record
        now.elapsed_time = lambda other: 1e3 * (other.at - now.at)
        return now


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    simulated = SimulatedGpu()
    monkeypatch.setattr(torch.cuda, "Event", simulated.event)
    monkeypatch.setattr(torch.cuda, "synchronize", simulated.synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    h200 = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    monkeypatch.setattr(torch, "empty", lambda size, **_: simulated.zeros(size))
    monkeypatch.setattr(time, "perf_counter", lambda: simulated.host)
    return simulated


def steady(timed: Callable[[], float]) -> float:
    """The seconds of a call once warm, as `settle` waits for it."""
    return [timed() for _ in range(10)][-1]


@pytest.mark.parametrize("count", [1, 20, 300])
def test_the_time_of_short_kernels_is_not_that_of_their_launches(gpu: SimulatedGpu, count: int) -> None:
    def call() -> None:
        for _ in range(count):
            gpu.launch(1e-6)

    assert steady(block(Cuda(), call)) == pytest.approx(count * 1e-6, rel=0.1, abs=1.5e-6)  # an event takes 1e-6


def test_at_least_256_megabytes_are_written_before_each_call(gpu: SimulatedGpu) -> None:
    Cuda().elapsed(lambda: gpu.launch(1e-3), 3)
    assert len(gpu.flushed) == 3
    assert min(gpu.flushed) >= 256e6


def test_a_larger_cache_is_flushed_whole(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    large = SimpleNamespace(L2_cache_size=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: large)
    Cuda().elapsed(lambda: gpu.launch(1e-3), 1)
    assert min(gpu.flushed) == 1 << 30


def test_a_first_call_runs_once_and_its_compilation_is_timed(gpu: SimulatedGpu) -> None:
    calls: list[float] = []

    def call() -> None:
        gpu.launch(1e-6, 1e-5 if calls else 30.0)
        calls.append(gpu.host)

    assert Cuda().elapsed(call, 1) == pytest.approx(30.0, rel=1e-4)
    assert len(calls) == 1
    assert steady(lambda: Cuda().elapsed(call, 1)) == pytest.approx(1e-6, abs=1.5e-6)


def test_a_call_that_waits_for_the_device_is_not_flushed_for_ever(gpu: SimulatedGpu) -> None:
    def call() -> None:
        gpu.launch(1e-5)
        gpu.synchronize()

    device = Cuda()
    for _ in range(20):
        device.elapsed(call, 1)
    gpu.flushed.clear()
    for _ in range(20):
        device.elapsed(call, 1)
    assert len(gpu.flushed) <= 3 * 20


def test_a_call_whose_launch_nothing_covers_is_still_timed(gpu: SimulatedGpu) -> None:
    def call() -> None:
        for _ in range(50_000):
            gpu.launch(1e-6)

    device = Cuda()
    before = gpu.host
    times = [device.elapsed(call, 1) for _ in range(4)]
    assert all(0.05 <= seconds <= 0.51 for seconds in times)
    assert gpu.host - before < 4 * 0.6  # the flushes have a limit
