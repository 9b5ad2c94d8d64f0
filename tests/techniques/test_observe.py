"""Observation of a run: names and counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from accelcheck.techniques.observe import ProfilerLog, _called


def work() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with torch.autograd.profiler.record_function("a range of its own"):
        module(torch.ones(2, 4)).sum().backward()


def test_the_profilers_names_and_counts_are_those_of_its_averages() -> None:
    work()
    with ProfilerLog("cpu") as log:
        work()
    with profile(activities=[ProfilerActivity.CPU]) as expected:
        work()
    averages = {event.key: event.count for event in expected.key_averages()}
    assert log.names() == averages
    assert log.count("a range of its own") == 1
    assert log.count("aten::(addmm|linear)") == 2


def test_a_profiler_that_saw_nothing_counts_nothing() -> None:
    log = ProfilerLog("cpu")
    with log:
        pass
    assert log.count("aten::.*") == 0


def test_a_range_that_the_device_shows_too_counts_once() -> None:
    # What kineto records of a range around two kernels: it is copied onto the device's timeline.
    seen = [
        recorded("Torch-Compiled Region: 0/0", DeviceType.CPU, annotation=True),
        recorded("aten::mm", DeviceType.CPU),
        recorded("Torch-Compiled Region: 0/0", DeviceType.CUDA, annotation=True),
        recorded("gemm", DeviceType.CUDA),
        recorded("gemm", DeviceType.CUDA),
    ]
    assert _called(seen) == {"Torch-Compiled Region: 0/0": 1, "aten::mm": 1, "gemm": 2}


def recorded(name: str, place: DeviceType, *, annotation: bool = False) -> Any:
    """An event as kineto gives it."""
    facts = {
        "name": name,
        "is_hidden_event": False,
        "start_thread_id": 1,
        "end_thread_id": 1,
        "device_type": place,
        "is_async": False,
        "is_user_annotation": annotation,
        "start_ns": 0,
        "end_ns": 0,
    }
    return SimpleNamespace(**{fact: (lambda value=value: value) for fact, value in facts.items()})
