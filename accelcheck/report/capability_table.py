"""Formats the capability table as text and as documentation. No torch."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from accelcheck.core.capability import Capability, Code
from accelcheck.core.case import LEVELS, Verdict
from accelcheck.report.console import Table

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from accelcheck.devices.base import Status
    from accelcheck.report.capabilities import TechniqueRow
    from accelcheck.workloads.base import Workload

RUNS = "runs"


def text(rows: Sequence[TechniqueRow], statuses: Mapping[str, Status]) -> list[str | Table]:
    """Text for people: the devices, a row for each technique with each device's answer, and the reasons, each once."""
    names = list(rows[0].answers) if rows else []
    chips = {name: s.capability if s.fingerprint is None else s.fingerprint.chip for name, s in statuses.items()}
    here = [f"{name}: {chips[name]}" for name in names if name in chips]
    cells: list[list[str]] = []
    for family, group in groupby(rows, key=lambda row: row.family):
        cells.append([f"[{family}]", *("" for _ in names), ""])
        for row in group:
            answers = (row.answers[name] for name in names)
            cells.append([row.name, *(RUNS if answer.ok else str(answer.code) for answer in answers), _counts(row)])
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


def markdown(rows: Sequence[TechniqueRow], workloads: Collection[Workload]) -> list[str]:
    """Markdown for the documentation, the same on every machine: techniques that this one lacks count as existing."""
    lines = [
        "# Techniques",
        "",
        "Made by `accelcheck list --markdown` from the capability table. A device runs what has `yes`; otherwise it",
        "says why the technique does not exist there; `asked there` is known on such a device alone. `needs` are",
        "packages besides torch. The last column counts the cases of one device at levels 1, 2 and 3.",
    ]
    for family, group in groupby(rows, key=lambda row: row.family):
        members = list(group)
        names = list(members[0].answers)
        lines += ["", f"## {family}", ""]
        lines += [
            f"| technique | promise | {' | '.join(names)} | needs | cases |",
            f"|---|---|{'---|' * len(names)}---|---|",
        ]
        for row in members:
            answers = " | ".join(_lasting(row.answers[name]) for name in names)
            needs = ", ".join(f"`{package}`" for package in row.packages)
            lines.append(
                f"| `{row.name}` | {row.promise} [source]({row.source}) | {answers} | {needs} | {_counts(row)} |"
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


def _lasting(answer: Capability) -> str:
    if answer.code is Code.NOT_ASKED or answer.tried:  # what was found by trying differs between chips of a device
        return "asked there"
    return str(answer.code) if answer.verdict is Verdict.UNSUPPORTED else "yes"


def _counts(row: TechniqueRow) -> str:
    return " / ".join(str(row.cases[level]) for level in (1, 2, 3))
