"""Formats workloads, their traits, devices and cases as tables and as JSON-ready values. No torch."""

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
    """List the techniques with every device's answer, and the number of cases up to each level."""
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
    """Make a row for each workload."""
    rows = [(w.name, str(w.level), *map(_words, (w.modes, w.dtypes, w.traits)), w.summary) for w in found]
    return Table(("workload", "level", "modes", "dtypes", "traits", "what it is"), rows, right=(1,))


def workloads_as_json(found: Iterable[Workload]) -> list[dict[str, Any]]:
    """List the workloads as JSON-ready values."""
    return [
        {
            "name": workload.name,
            "summary": workload.summary,
            "level": workload.level,
            "modes": sorted(map(str, workload.modes)),
            "dtypes": sorted(workload.dtypes),
            "traits": sorted(workload.traits),
        }
        for workload in found
    ]


def traits(techniques: Iterable[Technique], found: Sequence[Workload]) -> list[dict[str, Any]]:
    """List the traits by name, with the workloads that have each, and the techniques that require or exclude it."""
    known = list(techniques)
    names = {name for owner in found for name in owner.traits}
    names |= {name for owner in known for name in owner.requires | owner.excludes}
    return [
        {
            "name": name,
            "workloads": sorted(owner.name for owner in found if name in owner.traits),
            "required-by": sorted(owner.name for owner in known if name in owner.requires),
            "excluded-by": sorted(owner.name for owner in known if name in owner.excludes),
        }
        for name in sorted(names)
    ]


def traits_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Make a row for each trait: the number of techniques that ask for it, and the workloads that have it."""
    counts = ("required-by", "excluded-by")
    cells = [(str(row["name"]), *(str(len(row[name])) for name in counts), ", ".join(row["workloads"])) for row in rows]
    return Table(("trait", "required by", "excluded by", "workloads"), cells, right=(1, 2))


def devices(statuses: Iterable[Status]) -> Table:
    """Make a row for each device: its chip, or why it cannot be used."""
    rows = []
    for status in statuses:
        facts = status.fingerprint
        if facts is None:
            rows.append((status.device, str(status.capability), "", "", ""))
        else:
            rows.append((status.device, facts.chip, str(facts.count), facts.runtime, facts.driver))
    return Table(("device", "chip, or why it is absent", "count", "runtime", "driver"), rows, right=(2,))


def cases_as_json(found: Iterable[Case]) -> list[dict[str, Any]]:
    """List the cases with their parts."""
    return [{"id": case.id, **asdict(case), "mode": str(case.mode)} for case in found]


def _words(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))
