"""Workloads, their traits, devices and cases, as tables and as JSON-ready values. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accelcheck.report.console import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.core.case import Case
    from accelcheck.devices.base import Status
    from accelcheck.report.capabilities import TechniqueRow
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload


def techniques_as_json(rows: Iterable[TechniqueRow]) -> list[dict[str, Any]]:
    """The capability table: each technique with every device's answer, and its number of cases up to each level."""
    return [
        {
            "name": row.name,
            "family": row.family,
            "promise": row.promise,
            "source": row.source,
            "packages": dict(row.packages),
            "answers": {
                name: {
                    "runs": answer.ok,
                    "verdict": None if answer.verdict is None else str(answer.verdict),
                    "code": str(answer.code),
                    "reason": answer.reason,
                    "action": answer.action,
                }
                for name, answer in row.answers.items()
            },
            "cases": {str(level): count for level, count in row.cases.items()},
        }
        for row in rows
    ]


def workloads(found: Iterable[Workload]) -> Table:
    """A row for each workload."""
    rows = [(one.name, str(one.level), *map(_words, (one.modes, one.dtypes, one.traits)), one.summary) for one in found]
    return Table(("workload", "level", "modes", "dtypes", "traits", "what it is"), rows, right=(1,))


def workloads_as_json(found: Iterable[Workload]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [
        {
            "name": one.name,
            "summary": one.summary,
            "level": one.level,
            "modes": sorted(map(str, one.modes)),
            "dtypes": sorted(one.dtypes),
            "traits": sorted(one.traits),
        }
        for one in found
    ]


def traits(techniques: Iterable[Technique], found: Sequence[Workload]) -> list[dict[str, Any]]:
    """Each trait, with the workloads that have it, and the techniques that require it or are not tried with it; by name."""
    known = list(techniques)
    names = {name for one in found for name in one.traits}
    names |= {name for one in known for name in one.requires | one.excludes}
    return [
        {
            "name": name,
            "workloads": sorted(one.name for one in found if name in one.traits),
            "required-by": sorted(one.name for one in known if name in one.requires),
            "excluded-by": sorted(one.name for one in known if name in one.excludes),
        }
        for name in sorted(names)
    ]


def traits_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each trait: how many techniques ask for it, and the workloads that have it."""
    counts = ("required-by", "excluded-by")
    cells = [(str(row["name"]), *(str(len(row[name])) for name in counts), ", ".join(row["workloads"])) for row in rows]
    return Table(("trait", "required by", "excluded by", "workloads"), cells, right=(1, 2))


def devices(statuses: Iterable[Status]) -> Table:
    """A row for each device: what it is, or why it cannot be used."""
    rows = []
    for status in statuses:
        found = status.fingerprint
        if found is None:
            rows.append((status.device, str(status.capability), "", "", ""))
        else:
            rows.append((status.device, found.chip, str(found.count), found.runtime, found.driver))
    return Table(("device", "chip, or why it is absent", "count", "runtime", "driver"), rows, right=(2,))


def cases_as_json(found: Iterable[Case]) -> list[dict[str, Any]]:
    """Each case with its parts."""
    return [{"id": case.id, **asdict(case), "mode": str(case.mode)} for case in found]


def _words(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))
