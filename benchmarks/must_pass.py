"""Makes the must-pass lists, for regenerate.py.

A list holds the cases that the devices of its class declare to support and that no shipped ledger expects to fail.
Journals of whole runs on such a device remove cases found `unsupported` by trying, add new ones that passed, and give
the number of compared elements. A changed list gets the next version.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.capability import Code
from accelcheck.core.case import ALONE, LEVELS, Mode, Verdict
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.devices.generic import Generic
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import Ledger, shipped
from accelcheck.expectations.must_pass import FOLDER, OTHERS, Floor, MustPass
from accelcheck.techniques.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.core.case import Case
    from accelcheck.devices.base import Device
    from accelcheck.report.run import DeviceRun

TARGET = Path(must_pass.__file__).with_name(FOLDER)
JUDGED = [mode for mode in Mode if mode not in ALONE and mode is not Mode.PLATFORM]
"""Modes of the lists: platform items have a table of their own, in an assessment."""
LACKING = {kind: frozenset({Code.NO_PACKAGE, Code.WRONG_BUILD}) for kind in ("cuda", "rocm")}
"""Answers about the installed torch, ignored because the class's own session has Triton and NCCL."""


@dataclass
class Seen:
    """Results of the whole runs of a class.

    Attributes:
        level: Highest level that was run.
        refused: Cases that did not run: unsupported, found by trying, or without a package of the class's session.
        elements: Compared elements, by key.
        passed: Cases that passed; for `OTHERS`, on any device without a list of its own.
    """

    level: int = 0
    refused: set[str] = field(default_factory=set)
    elements: dict[str, int] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)


def lists(runs: Sequence[DeviceRun]) -> dict[str, str]:
    """The text of each list by class: as stored where nothing changed, or else of the next version."""
    matrix, texts = Matrix.load(), {}
    places: dict[str, Device] = {**devices(), OTHERS: Generic("generic")}
    for kind, device in places.items():
        seen, old = found(kind, runs), must_pass.stored().get(kind)
        if old is None and not seen.level:
            continue  # the list of all accelerators is its own
        levels = required(kind, device, matrix, seen, old)
        measured = max(seen.level, old.measured if old else 0)
        floors = {level: floor(levels, level, seen, old) for level in LEVELS}
        same = old is not None and (levels, measured, floors) == (old.levels, old.measured, old.floors)
        version = old.version + (not same) if old else 1
        texts[kind] = must_pass.written(version, measured, levels, floors)
    return texts


def found(kind: str, runs: Sequence[DeviceRun]) -> Seen:
    seen = Seen()
    for run in runs:
        if run.device == kind:
            seen.level = max(seen.level, run.level)
            seen.refused |= {key(r.case) for r in run.records if not r.verdict.executed}
            seen.elements |= {key(r.case): r.compared for r in run.records if r.compared}
        if kind in {run.device, OTHERS if run.device not in must_pass.stored() else ""}:
            seen.passed |= {key(r.case) for r in run.records if r.verdict is Verdict.PASS}
    return seen


def required(kind: str, device: Device, matrix: Matrix, seen: Seen, old: MustPass | None) -> dict[str, int]:
    """The levels of the cases, by key: those of the old list, and others that a run has passed."""
    # Required although it fails on some chips: such a chip does not pass the whole list.
    ledger = replace(Ledger.load(shipped((kind,))), chips={kind: "one that no entry names"})
    candidates = seen.passed | (set(old.levels) if old else set())
    return {
        name: case.level
        for case in matrix.cases(Selection((kind,), level=max(LEVELS)), JUDGED)
        if (name := key(case)) in candidates - seen.refused
        and declared(kind, device, matrix, case)
        and not ledger.covering(case.id)
    }


def declared(kind: str, device: Device, matrix: Matrix, case: Case) -> bool:
    """Returns True where the device declares to support a case that needs no package besides torch and torchao."""
    technique = matrix.techniques[case.technique]
    if case.dtype not in device.dtypes or technique.packages:
        return False
    try:
        needs = technique.needs(device, *sorted(matrix.workloads[case.workload].features))
        answers = [needs, technique.capability(device)]
    except (RuntimeError, AssertionError, ImportError):  # only the device itself can tell
        return False
    # Answers found by trying hold for the chip at hand only.
    return all((answer.ok and not answer.tried) or answer.code in LACKING.get(kind, ()) for answer in answers)


def floor(levels: dict[str, int], level: int, seen: Seen, old: MustPass | None) -> Floor:
    names = [name for name, its in levels.items() if its <= level]
    compared = sum(seen.elements.get(name, 0) for name in names)
    if not seen.level and old is not None:
        compared = old.floors[level].elements
    return Floor(len(names), len({name.partition("/")[0] for name in names}), compared)


def key(case: Case) -> str:
    return f"{case.technique}/{case.workload}/{case.dtype}/{case.mode}"
