"""Makes the must-pass lists, or says how they differ: ``python benchmarks/must_pass.py [--write] [JOURNAL ...]``.

A list has what the devices of its class declare to support and what no shipped ledger expects to fail. Journals of whole runs on a
device of a class take out what they found `unsupported` by trying, and say how many elements are compared. A changed list gets
the next version.

Exit status: 0 if the lists are as stored, 1 if they differ and ``--write`` was not given.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.capability import Code
from accelcheck.core.case import ALONE, Mode
from accelcheck.core.selection import Selection
from accelcheck.core.words import LEVELS
from accelcheck.devices import devices
from accelcheck.devices.generic import Generic
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import Ledger, shipped
from accelcheck.expectations.must_pass import FOLDER, OTHERS, SUFFIX, Floor, MustPass
from accelcheck.report.run import load
from accelcheck.techniques.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.core.case import Case
    from accelcheck.devices.base import Device
    from accelcheck.report.run import DeviceRun

TARGET = Path(must_pass.__file__).with_name(FOLDER)
JUDGED = [mode for mode in Mode if mode not in ALONE and mode is not Mode.PLATFORM]
"""Platform items give points of an assessment, which has a table of its own."""
LACKING = {kind: frozenset({Code.NO_PACKAGE, Code.WRONG_BUILD}) for kind in ("cuda", "rocm")}
"""Answers that come from the torch at hand, where that of the class's own session has Triton and NCCL."""


@dataclass
class Seen:
    """What whole runs of a class show.

    Attributes:
        level: The highest that was run.
        refused: Cases that did not run: not supported, found by trying, or without a package that the session of the class installs.
        elements: Compared, by key.
    """

    level: int = 0
    refused: set[str] = field(default_factory=set)
    elements: dict[str, int] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journals", nargs="*", type=Path, metavar="JOURNAL", help="of whole runs")
    parser.add_argument("--write", action="store_true", help="store the lists")
    given = parser.parse_args()
    matrix, runs = Matrix.load(), load(given.journals)
    places: dict[str, Device] = {**devices(), OTHERS: Generic("generic")}
    seen = {kind: found(kind, runs) for kind in places}
    stored = must_pass.stored() if TARGET.is_dir() else {}
    changed = False
    for kind, device in places.items():
        old = stored.get(kind)
        levels = required(kind, device, matrix, seen[kind], old)
        measured = max(seen[kind].level, old.measured if old else 0)
        floors = {level: floor(levels, level, seen[kind], old) for level in LEVELS}
        if old is not None and (levels, measured, floors) == (old.levels, old.measured, old.floors):
            print(f"{kind}: as stored")
            continue
        changed = True
        more, fewer = (set(levels) - set(old.levels), set(old.levels) - set(levels)) if old else (set(levels), set())
        text = must_pass.written(old.version + 1 if old else 1, measured, levels, floors)
        print(
            f"{kind}: {len(levels)} cases, {len(more)} more and {len(fewer)} fewer than stored, measured at level {measured}"
        )
        print("\n".join(f"  {line}" for line in text.splitlines() if line.startswith("floor")))
        if given.write:
            TARGET.mkdir(exist_ok=True)
            (TARGET / f"{kind}{SUFFIX}").write_text(text, encoding="ascii")
    return int(changed and not given.write)


def found(kind: str, runs: Sequence[DeviceRun]) -> Seen:
    seen = Seen()
    for run in runs:
        if run.device == kind:
            seen.level = max(seen.level, run.level)
            seen.refused |= {key(r.case) for r in run.records if not r.verdict.executed}
            seen.elements |= {key(r.case): r.compared for r in run.records if r.compared}
    return seen


def required(kind: str, device: Device, matrix: Matrix, seen: Seen, old: MustPass | None) -> dict[str, int]:
    """The levels of the cases, by key."""
    ledger = Ledger.load(shipped((kind,)))
    levels = {}
    for case in matrix.cases(Selection((kind,), level=max(LEVELS)), JUDGED):
        name = key(case)
        known = old is not None and name not in old.levels and case.level <= old.measured  # an earlier run refused it
        if known and name not in seen.elements:
            continue
        if name in seen.refused or not declared(kind, device, matrix, case) or ledger.covering(case.id):
            continue
        levels[name] = case.level
    return levels


def declared(kind: str, device: Device, matrix: Matrix, case: Case) -> bool:
    """Whether the device declares to support a case that needs no package besides torch and torchao."""
    technique = matrix.techniques[case.technique]
    if case.dtype not in device.dtypes or technique.packages:
        return False
    try:
        needs = technique.needs(device, *sorted(matrix.workloads[case.workload].features))
        answers = [needs, technique.capability(device)]
    except (RuntimeError, AssertionError, ImportError):  # only the device itself can tell
        return False
    # What was found by trying is of the chip at hand.
    return all((answer.ok and not answer.tried) or answer.code in LACKING.get(kind, ()) for answer in answers)


def floor(levels: dict[str, int], level: int, seen: Seen, old: MustPass | None) -> Floor:
    names = [name for name, its in levels.items() if its <= level]
    compared = sum(seen.elements.get(name, 0) for name in names)
    if not seen.level and old is not None:
        compared = old.floors[level].elements
    return Floor(len(names), len({name.partition("/")[0] for name in names}), compared)


def key(case: Case) -> str:
    return f"{case.technique}/{case.workload}/{case.dtype}/{case.mode}"


if __name__ == "__main__":
    sys.exit(main())
