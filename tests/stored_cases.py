"""The list of all cases with their levels and seeds, as `cases.txt` beside this file keeps it.

`benchmarks/regenerate.py` adds cases to it. One that is in it must never change or go without a line in CHANGELOG.md,
since ledgers, baselines and journals name cases by their ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcheck.core.case import Case

STORED = Path(__file__).with_name("cases.txt")
DEVICE = "cpu"
"""Cases are the same on all devices but for this part of their ids."""

Fact = tuple[str, int, int]
"""Id, level and seed of a case."""


def facts(cases: Iterable[Case]) -> set[Fact]:
    """Kept facts of cases."""
    return {(case.id, case.level, case.seed) for case in cases}


def everything() -> list[Case]:
    """All built-in cases of one device."""
    from accelcheck.core.case import LEVELS
    from accelcheck.core.selection import Selection
    from accelcheck.techniques.matrix import Matrix

    return Matrix.load().cases(Selection((DEVICE,), level=max(LEVELS)))


def written(cases: Iterable[Case]) -> str:
    """Seeds by workload, then a line for each technique, dtype, mode and level with its workloads."""
    cases = list(cases)
    seeds = sorted({(case.workload, case.seed) for case in cases})
    groups = defaultdict(list)
    for case in cases:
        groups[case.technique, case.dtype, str(case.mode), case.level].append(case.workload)
    lines = [f"seed {workload} {seed}" for workload, seed in seeds]
    for (technique, dtype, mode, level), workloads in sorted(groups.items()):
        lines.append(f"case {technique} {dtype} {mode} {level} {' '.join(sorted(workloads))}")
    return "\n".join(lines) + "\n"


def stored() -> set[Fact]:
    """Parses the file."""
    return set(parsed(STORED.read_text(encoding="ascii")))


def parsed(text: str) -> Iterator[Fact]:
    """Parses a text of `written`."""
    seeds: dict[str, int] = {}
    for line in text.splitlines():
        kind, *words = line.split()
        if kind == "seed":
            seeds[words[0]] = int(words[1])
        else:
            technique, dtype, mode, level, *workloads = words
            for workload in workloads:
                yield f"{technique}/{workload}/{DEVICE}/{dtype}/{mode}", int(level), seeds[workload]
