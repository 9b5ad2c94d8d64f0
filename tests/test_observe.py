"""How a run is watched: names and counts."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from accelcheck.techniques.observe import ProfilerLog


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
