"""Strides are held against those of eager on the device: on a device whose libraries choose others than the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Bed, Planted, bench, case, faults, seeded

from accelcheck.checks.trial import Trial
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import nothing
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.probes import PROBES, draws


class Accelerator(Bed):
    """The CPU, which does not say that it is the host."""

    name = "accelerator"

    def has(self, feature: str) -> bool:
        return feature != "host" and super().has(feature)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Problems that were put on the device, where programs give outputs in channels-last."""
    place, problems = Trial.place, []

    def placing(trial: Trial, problem: Problem, seed: int) -> Program:
        problems.append(problem)
        program = place(trial, problem, seed)
        program.module.forward = Channels(program.module.forward)  # what the device does
        return program

    monkeypatch.setattr(Trial, "place", placing)
    return problems


class Channels:
    """A function with its result in channels-last."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def __call__(self, *inputs: Any) -> Any:
        return self.plain(*inputs).contiguous(memory_format=torch.channels_last)


def dense(program: Program) -> None:
    """Gives the CPU's strides, not the device's."""
    module = program.module
    program.call = lambda *inputs: module(*inputs).contiguous()


def judged(change: Change, store: Store, mode: Mode = FORWARD) -> Record:
    workload, device = seeded("conv-replicated"), Accelerator()
    technique = Planted(change, keeps_strides=True)
    return bench(store, technique, workload, device).run(replace(case(workload, mode), device=device.name))


@pytest.mark.usefixtures("placed")
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_what_keeps_the_devices_strides_passes(mode: Mode, store: Store) -> None:
    record = judged(nothing, store, mode)
    assert record.verdict is Verdict.PASS, record.why


@pytest.mark.usefixtures("placed")
def test_what_does_not_keep_the_devices_strides_fails(store: Store) -> None:
    caught = faults(judged(dense, store))
    assert caught.keys() == {"out"}
    assert all(what.startswith("strides") for what in caught["out"])


def test_eager_is_run_once_on_the_device_for_its_strides(placed: list[Problem], tmp_path: Path) -> None:
    store = Store(tmp_path)
    judged(nothing, store)
    first = len(placed)
    judged(nothing, store)
    reshaping = sum(
        PROBES[draw.probe].reshapes for draw in draws(seeded("conv-replicated"), FORWARD, lambda _: True) if draw.probe
    )
    assert first - (len(placed) - first) == 1 + reshaping  # inputs of another shape have strides of their own


def test_a_device_without_eager_is_held_to_the_cpus_strides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place, calls = Trial.place, []

    def placing(trial: Trial, problem: Problem, seed: int) -> Program:
        calls.append(1)
        if len(calls) == 1:
            raise NotImplementedError("no such kernel")
        return place(trial, problem, seed)

    monkeypatch.setattr(Trial, "place", placing)
    assert judged(nothing, Store(tmp_path)).verdict is Verdict.PASS
