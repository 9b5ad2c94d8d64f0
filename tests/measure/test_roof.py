"""Peak rates: sizes grow until the clock can tell, and stop before a slow device takes minutes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.devices.cpu import Cpu
from accelcheck.measure import roof


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's modes have no annotations
    """Side of the last product, elements of the last copy, and whether the second matrix was transposed."""

    side = copied = 0
    transposed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.side, self.transposed = args[0].shape[0], args[1].stride(0) == 1
            return args[0]  # the time is what counts here
        if func is torch.ops.aten.copy_.default:
            self.copied = args[0].numel()
        return func(*args, **(kwargs or {}))


class Timed(Cpu):
    """Computes at a fixed rate on a clock of its own, which nothing else moves."""

    def __init__(self, kind: str = "toy", *, rate: float, latency: float = 0.0, transposed: float = 1.0) -> None:
        self.type = kind
        self.rate = rate
        self.latency = latency
        self.transposed = transposed
        self.now = 0.0
        self.sides: list[int] = []

    def elapsed(self, call: Any, times: int) -> float:
        with Observed() as seen:  # type: ignore[no-untyped-call]  # as above
            call()
        self.sides.append(seen.side)
        work = float(2 * seen.side**3 or 8 * seen.copied)
        rate = self.rate * (self.transposed if seen.transposed else 1.0)
        seconds = times * (self.latency + work / rate)
        self.now += seconds
        return seconds

    def torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a device's own clock that of `roof`."""

    def use(device: Timed) -> Timed:
        monkeypatch.setattr(roof, "_now", lambda: device.now)
        return device

    return use


def test_a_matmul_has_two_operations_a_product() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert roof.flops(lambda: a @ b) == 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("rate", "latency", "side"), [(1e8, 0.0, 128), (2e9, 0.0, 256), (1e11, 0.0, 1024), (1e13, 0.02, 1024)]
)
def test_matrices_grow_as_far_as_the_limit_allows(
    clock: Any, monkeypatch: pytest.MonkeyPatch, rate: float, latency: float, side: int
) -> None:
    monkeypatch.setattr(roof, "ELSEWHERE", 1024)
    device = clock(Timed(rate=rate, latency=latency))
    highest = roof.matmul_peak(device, "float32")
    assert highest.size == f"{side} x {side} matrices"
    assert highest.remark == f"with {highest.size}"
    assert highest.value == pytest.approx(2 * side**3 / (latency + 2 * side**3 / rate))
    assert highest.seconds == pytest.approx(device.now)
    assert highest.seconds <= roof.LIMIT * 1.1


def test_one_call_serves_where_it_takes_longer_than_the_limit_and_the_remark_says_so(clock: Any) -> None:
    device = clock(Timed(rate=1e5))
    highest = roof.matmul_peak(device, "float32")
    assert device.sides == [128]
    assert highest.value == pytest.approx(1e5)
    assert highest.remark == "with 128 x 128 matrices, which took 42 s"


def test_a_clock_too_coarse_for_small_matrices_gets_larger_ones(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Coarse(Timed):
        def elapsed(self, call: Any, times: int) -> float:
            return float(int(super().elapsed(call, times) * 100)) / 100

    monkeypatch.setattr(roof, "ELSEWHERE", 1024)
    assert roof.matmul_peak(clock(Coarse(rate=4e10)), "float32").size == "1024 x 1024 matrices"


def test_a_device_type_with_a_side_of_its_own_is_measured_up_to_it(clock: Any) -> None:
    assert roof.matmul_peak(clock(Timed("xla", rate=1e13)), "float32").size == "1024 x 1024 matrices"


@pytest.mark.slow
def test_a_copy_grows_as_far_as_the_limit_allows(clock: Any) -> None:
    assert roof.bandwidth(clock(Timed(rate=1e8))).size == "8 MiB"
    fast = roof.bandwidth(clock(Timed(rate=1e11)))
    assert fast.size == "256 MiB"
    assert fast.value == pytest.approx(1e11)


def test_peaks_are_measured_once(clock: Any) -> None:
    device = clock(Timed("cpu", rate=1e11))
    first = roof.matmul_peak(device, "float32"), roof.bandwidth(device)
    calls = len(device.sides)
    assert (roof.matmul_peak(device, "float32"), roof.bandwidth(device)) == first
    assert len(device.sides) == calls


def test_the_peak_is_that_of_the_faster_layout(clock: Any) -> None:
    device = clock(Timed("cpu", rate=1e10, transposed=5.0))
    assert roof.matmul_peak(device, "float32").value == pytest.approx(5e10)


def test_the_slower_layout_does_not_keep_the_matrices_small(clock: Any) -> None:
    device = clock(Timed("cpu", rate=2e10, transposed=20.0))
    highest = roof.matmul_peak(device, "float32")
    assert highest.size == "1024 x 1024 matrices"
    assert highest.value == pytest.approx(4e11)
    assert highest.seconds <= roof.LIMIT
