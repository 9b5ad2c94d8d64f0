"""The process of a duet: what it judges, measures and says, and its clock."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from plugin_harness import Toy, raises
from torch import nn

from accelcheck.core.case import Case, Mode
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.experiments import duet_process
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.base import Problem, Workload

if TYPE_CHECKING:
    import pytest


MLP, CNN = "eager/speed-mlp/cpu/float32/speed", "eager/speed-cnn/cpu/float32/speed"


def linear(generator: torch.Generator, extent: int) -> Problem:
    return Problem(nn.Linear(8, 8), (torch.randn(4, 8, generator=generator),))


def worker(folder: Path, *techniques: Toy | Eager) -> duet_process._Worker:
    tiny = Workload("tiny", "A linear layer.", linear, modes=frozenset({Mode.FORWARD, Mode.SPEED}))
    known = Matrix({technique.name: technique for technique in techniques}, {"tiny": tiny})
    return duet_process._Worker(known, devices()["cpu"], folder)


def case(technique: str) -> Case:
    return Case(technique, "tiny", "cpu", "float32", Mode.SPEED, 1)


def test_a_process_judges_as_the_suite_does(tmp_path: Path) -> None:
    bad = Toy("bad", raises)
    assert worker(tmp_path, Eager()).judged(case("eager")) == {}
    result = worker(tmp_path, bad).judged(case("bad"))
    assert result["broken"]
    assert result["wrong"].startswith("error: ")


def test_a_process_measures_latency_and_its_part_of_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duet_process, "SECONDS", 0.5)  # beside load a few blocks say nothing of their median
    monkeypatch.setattr(duet_process, "stop", lambda: None)
    comparison = worker(tmp_path, Eager()).measured(case("eager"), duet_process.Turns())
    assert 1e-7 < comparison["seconds"] < 1.0
    assert 0.1 < comparison["to_eager"] < 10.0


def test_the_clock_of_a_process_stands_still_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[None] = []

    def stop() -> None:
        time.sleep(2)
        stops.append(None)

    monkeypatch.setattr(duet_process, "stop", stop)
    monkeypatch.setattr(duet_process, "TURN", 0.02)
    turns = duet_process.Turns()
    start, began = turns.now(), time.perf_counter()
    while not stops:
        now = turns.now()
    assert now - start < 1.5  # of 0.02, on a busy machine
    assert time.perf_counter() - began >= 2


def test_cases_are_taken_in_the_order_in_which_they_were_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The other process may have another accelcheck, which lists them otherwise.
    monkeypatch.setattr(duet_process._Worker, "judged", lambda *_: {})
    for asked in ([MLP, CNN], [CNN, MLP]):
        selection = asdict(Selection(("cpu",), level=2, cases=tuple(asked)))
        duet_process._work({"task": "judge", "selection": selection}, tmp_path)
        begun = [line for line in capsys.readouterr().out.splitlines() if '"begin"' in line]
        assert [first in line for first, line in zip(asked, begun, strict=True)] == [True, True]


def test_what_a_technique_raises_while_it_is_measured_is_its_cases_error(tmp_path: Path) -> None:
    finished = []

    class Bad(Toy):
        def finish(self) -> None:
            finished.append(self.name)

    comparison = worker(tmp_path, Bad("bad", raises)).measured(case("bad"), duet_process.Turns())
    assert comparison["broken"]
    assert comparison["wrong"].startswith("error: ")
    assert finished == ["bad"]
