from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from accelcheck.devices.cpu import Cpu
from accelcheck.measure import kernels
from accelcheck.measure.kernels import Launches, launches


def test_operators_that_others_call_do_not_count() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    assert launches(Cpu(), lambda: layer(x)) == Launches(
        {"aten::linear": 1}, None
    )  # aten::linear, which calls aten::addmm
    assert launches(Cpu(), lambda: layer(layer(x)).relu()) == Launches({"aten::linear": 2, "aten::relu": 1}, None)


@pytest.mark.parametrize("name", ["Torch-Compiled Region: 0/0", "step", "call of model::step"])
def test_ranges_are_no_operators(name: str) -> None:
    def call() -> torch.Tensor:
        with torch.profiler.record_function(name):
            return torch.ones(2) + 1

    assert launches(Cpu(), call).count == 2


def test_a_call_that_launches_nothing_counts_nothing() -> None:
    assert launches(Cpu(), lambda: None) == Launches({}, None)


def test_what_is_launched_in_place_of_what_is_said_by_name() -> None:
    eager = Launches({"mm": 1, "mul": 3, "add": 2, "relu": 2, "exp": 1, "sub": 1}, None)
    assert Launches({"mm": 1, "fused": 1}, None).instead_of(eager) == (
        "1 fused in place of 3 mul, 2 add, 2 relu, 1 exp, 1 other"
    )
    assert Launches({}, None).instead_of(Launches(dict.fromkeys("abcdef", 3), None)).endswith("3 d, 6 other")
    assert Launches({"mm": 1}, None).instead_of(Launches({"mm": 2}, None)) == "nothing in place of 1 mm"
    assert eager.instead_of(eager) == ""


def test_kernels_of_a_device_count_in_place_of_operators() -> None:
    seen = [
        recorded("aten::mm", DeviceType.CPU, 0.0),
        recorded("void gemm<float, 4>(int, float*)", DeviceType.CUDA, 3.0),
        recorded("relu", DeviceType.CUDA, 1.0),
    ]
    result = kernels._counted(seen)
    assert result.count == 2
    assert result.names == {"gemm": 1, "relu": 1}
    assert result.seconds == pytest.approx(4e-6)


def test_ranges_that_a_device_shows_are_no_kernels() -> None:
    seen = [
        recorded("a step of mine", DeviceType.CPU, 0.0, annotation=True),
        recorded("aten::mm", DeviceType.CPU, 0.0),
        recorded("a step of mine", DeviceType.CUDA, 9.0, annotation=True),  # as long as all kernels within
        recorded("gemm", DeviceType.CUDA, 3.0),
    ]
    result = kernels._counted(seen)
    assert result.names == {"gemm": 1}
    assert result.seconds == pytest.approx(3e-6)
    assert kernels._counted([seen[1], seen[2]]) == Launches({"aten::mm": 1}, None)


def recorded(name: str, place: DeviceType, microseconds: float, *, annotation: bool = False) -> Any:
    """An event as `torch.profiler.profile.events` gives it."""
    return SimpleNamespace(
        name=name,
        device_type=place,
        self_device_time_total=microseconds,
        cpu_parent=None,
        is_user_annotation=annotation,
    )


def test_a_trace_holds_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    launches(Cpu(), lambda: torch.ones(2, 2) @ torch.ones(2, 2), path)
    assert "aten::matmul" in {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
