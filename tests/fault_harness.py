"""Has the engine judge the suite's own workloads with something planted in them. No test by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from technique_harness import StubDevice

from accelcheck.checks.execute import Bench
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import DTYPES, Case, Evidence, Mode, Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import Record
from accelcheck.core.registry import discover
from accelcheck.devices.base import Device, Status
from accelcheck.selftest.faults.base import Change
from accelcheck.techniques.base import Technique
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.observe import Log
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Workload

FORWARD, BACKWARD, TRAIN = Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN


class Bed(StubDevice):
    """The CPU, in every dtype, without probing its matmul for each case."""

    name = "cpu"
    dtypes = frozenset(DTYPES)

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__(kind, error=lambda: 0.0)


class Planted(Technique):
    """Changes the program as a faulty, or another correct, implementation would.

    Where `accelcheck.selftest.faults.base.Planted` leaves a technique as it is, this one is what a test makes of it.
    """

    name = "planted"
    family = "planted"
    promise = "None."
    source = "https://example.invalid"
    dtypes = DTYPES

    def __init__(self, change: Change, *, warmups: int = 0, keeps_strides: bool = False) -> None:
        self.change = change
        self.warmups = warmups
        self.keeps_strides = keeps_strides

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.change(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield Evidence("the program was changed", 1, engaged=True)


class Once(Planted):
    """Has no gradients of gradients."""

    differentiates_twice = False


@functools.cache
def built_in() -> Mapping[str, Workload]:
    """The suite's workloads by name."""
    return {thing.name: cast("Workload", thing) for thing in discover("accelcheck.workloads", "WORKLOADS")}


def seeded(name: str, number: int = 0) -> Workload:
    """A built-in workload; with a number other than 0 under another name, and so from another seed."""
    workload = built_in()[name]
    return replace(workload, name=f"{name}+{number}") if number else workload


def bench(store: Store, technique: Technique, workload: Workload, device: Device | None = None) -> Bench:
    """A bench of one technique and one workload, on the CPU if nothing else is said."""
    place = Bed() if device is None else device
    return Bench(
        matrix=Matrix({technique.name: technique}, {workload.name: workload}),
        devices={place.name: place},
        statuses={place.name: Status(place.name, SUPPORTED)},
        store=store,
    )


def case(workload: Workload, mode: Mode = FORWARD, dtype: str = "float32", technique: str = "planted") -> Case:
    """The case of a workload."""
    return Case(technique, workload.name, "cpu", dtype, mode, 1)


def verdict_of(
    store: Store, technique: Technique, workload: Workload, mode: Mode = FORWARD, dtype: str = "float32"
) -> Record:
    """The engine's record of a technique on a workload."""
    return bench(store, technique, workload).run(case(workload, mode, dtype, technique.name))


def _ended(
    verdict: Verdict,
    store: Store,
    technique: Technique,
    workload: Workload,
    mode: Mode = FORWARD,
    dtype: str = "float32",
) -> Record:
    record = verdict_of(store, technique, workload, mode, dtype)
    assert record.verdict is verdict, f"{record.verdict}: {record.why}\n{record.traceback}"
    return record


passed = functools.partial(_ended, Verdict.PASS)
"""The record as of `verdict_of`, after an assertion that it is a pass."""

failed = functools.partial(_ended, Verdict.FAIL)
"""The record as of `verdict_of`, after an assertion that it is a failure."""

erred = functools.partial(_ended, Verdict.ERROR)
"""The record as of `verdict_of`, after an assertion that it is an error."""


def observed(record: Record, claim: str) -> str:
    """The observation of the one entry with a claim; empty without one."""
    (text,) = [str(entry.observed) for entry in record.evidence if entry.claim == claim] or [""]
    return text


def faults(record: Record) -> dict[str, set[str]]:
    """Returns faults by path: the views that caught them, or the kind of fault."""
    table: dict[str, set[str]] = {}
    if record.verdict is Verdict.FAIL:
        for fault in record.faults:
            path = "not engaged" if fault.kind is FaultKind.EVIDENCE else fault.path
            table.setdefault(path, set()).add(f"view {fault.what}" if fault.kind is FaultKind.VIEW else fault.what)
    return table
