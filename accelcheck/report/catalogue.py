"""Makes and formats the capability table (each technique, and each device's answer), and lists of all else. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.core.case import LEVELS, Verdict
from accelcheck.core.imports import unknown_device
from accelcheck.core.selection import Selection
from accelcheck.devices import devices as known_devices
from accelcheck.devices.base import Device, Status
from accelcheck.report.console import Table

if TYPE_CHECKING:
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.matrix import Matrix
    from accelcheck.workloads.base import Workload

GENERIC = "generic"
"""Name of the column for a device of which only the torch type is known."""
RUNS = "runs"


@dataclass(frozen=True)
class TechniqueRow:
    """One technique, with each device's answer (support, or the reason against it) and its cases up to each level."""

    technique: Technique
    answers: Mapping[str, Capability]
    cases: Mapping[int, int]


def technique_rows(matrix: Matrix, places: Mapping[str, Device]) -> list[TechniqueRow]:
    """Make the table, sorted by family and name, from the devices' declarations; none needs to be present."""
    made = []
    for technique in sorted(matrix.techniques.values(), key=lambda technique: (technique.family, technique.name)):
        selection = Selection(("any",), techniques=(technique.name,), level=max(LEVELS))
        levels = [case.level for case in matrix.cases(selection)]
        answers = {name: _answer(technique, device) for name, device in places.items()}
        cases = {level: sum(case_level <= level for case_level in levels) for level in LEVELS}
        made.append(TechniqueRow(technique, answers, cases))
    return made


def _answer(technique: Technique, device: Device) -> Capability:
    """Ask a technique; some techniques need the device to be present."""
    try:
        return technique.answer(device)
    except (RuntimeError, AssertionError, ImportError):  # torch raises one of these without the accelerator
        return unavailable(Code.NOT_ASKED, f"only {device.name} itself can tell", "ask on a machine that has it")


def columns(asked: Sequence[str] = (), extra: Sequence[Device] = ()) -> Mapping[str, Device]:
    """Devices of the table: the `asked` ones, or all, with `extra` and a generic one; `UnknownNameError` for others."""
    from accelcheck.devices.generic import Generic

    known = {**known_devices(extra), GENERIC: Generic(GENERIC)}
    for name in asked:
        if name not in known:
            raise unknown_device(name, list(known), "--import")
    return {name: device for name, device in known.items() if not asked or name in asked}


def techniques_as_json(rows: Iterable[TechniqueRow]) -> list[dict[str, Any]]:
    """List the techniques with every device's answer, and the number of cases up to each level."""
    return [
        {
            **{name: getattr(row.technique, name) for name in ("name", "family", "promise", "source")},
            "packages": dict(row.technique.packages),
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


def techniques(rows: Sequence[TechniqueRow], statuses: Mapping[str, Status]) -> list[str | Table]:
    """Text for people: the devices, a row for each technique with each device's answer, and the reasons, each once."""
    names = list(rows[0].answers) if rows else []
    chips = {name: s.capability if s.fingerprint is None else s.fingerprint.chip for name, s in statuses.items()}
    here = [f"{name}: {chips[name]}" for name in names if name in chips]
    cells: list[list[str]] = []
    for family, group in groupby(rows, key=lambda row: row.technique.family):
        cells.append([f"[{family}]", *("" for _ in names), ""])
        for row in group:
            answers = (row.answers[name] for name in names)
            cells.append(
                [row.technique.name, *(RUNS if answer.ok else str(answer.code) for answer in answers), _counts(row)]
            )
    table = Table(["technique", *names, "cases at level 1, 2, 3"], cells)
    reasons = {f"{name}: {answer}" for row in rows for name, answer in row.answers.items() if not answer.ok}
    return [*here, "", table, "", *sorted(reasons)]


def refused(workload: str, refusals: Mapping[str, str]) -> list[str]:
    """Text for people: techniques that are not tried with a workload, by reason, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        by_reason.setdefault(reason, []).append(name)
    lines = ["", f"not tried with {workload}: {len(refusals)} techniques"]
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"  {len(names)} x {reason}: {', '.join(sorted(names))}")
    return lines


def techniques_markdown(rows: Sequence[TechniqueRow], workloads: Collection[Workload]) -> list[str]:
    """Markdown for the documentation, the same on every machine: techniques that this one lacks count as existing."""
    lines = [
        "# Techniques",
        "",
        "Made by `accelcheck list --markdown` from the capability table. A device runs what has `yes`; otherwise it",
        "says why the technique does not exist there; `asked there` is known on such a device alone. `needs` are",
        "packages besides torch. The last column counts the cases of one device at levels 1, 2 and 3.",
    ]
    for family, group in groupby(rows, key=lambda row: row.technique.family):
        members = list(group)
        names = list(members[0].answers)
        lines += ["", f"## {family}", ""]
        lines += [
            f"| technique | promise | {' | '.join(names)} | needs | cases |",
            f"|---|---|{'---|' * len(names)}---|---|",
        ]
        for row in members:
            own = row.technique
            answers = " | ".join(_lasting(row.answers[name]) for name in names)
            needs = ", ".join(f"`{package}`" for package in own.packages)
            lines.append(
                f"| `{own.name}` | {own.promise} [source]({own.source}) | {answers} | {needs} | {_counts(row)} |"
            )
    lines += ["", "# Workloads", "", "| workload | what it is | modes | level |", "|---|---|---|---|"]
    listed = [workload for workload in workloads if workload.level < max(LEVELS)]
    lines += [f"| `{w.name}` | {w.summary} | {', '.join(sorted(w.modes))} | {w.level} |" for w in listed]
    alone = sum(workload.level == max(LEVELS) for workload in workloads)
    if alone:
        lines += [
            "",
            f"{alone} further workloads have level {max(LEVELS)}: `accelcheck list --workloads` lists them too.",
        ]
    return lines


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


def _words(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, names)))


def _lasting(answer: Capability) -> str:
    if answer.code is Code.NOT_ASKED or answer.tried:  # what was found by trying differs between chips of a device
        return "asked there"
    return str(answer.code) if answer.verdict is Verdict.UNSUPPORTED else "yes"


def _counts(row: TechniqueRow) -> str:
    return " / ".join(str(row.cases[level]) for level in (1, 2, 3))
