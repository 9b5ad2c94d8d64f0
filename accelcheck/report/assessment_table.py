"""Formats an assessment as text, as Markdown for the issue that the process asks for, and as JSON. No torch."""

import re
from collections.abc import Sequence
from typing import Any

from accelcheck.report.assessment import Assessment, ItemResult, TableResult, level
from accelcheck.report.console import Table, escaped
from accelcheck.report.quality import STABLE, UNSTABLE

SOURCE = "https://github.com/pytorch/pytorch/issues/167283"
SCHEMA = 1
_OF_ITEM = ("evidenced", "claimed", "missing", "evidence", "lacking", "link")
_MARKUP = re.compile(r"([\\`*_\[\]<>#|~&])")
"""Characters that Markdown or HTML may take for markup."""
_MENTION = re.compile(r"(?<!\w)@(?=\w)")
"""Mentions, by which GitHub notifies people."""


def lines(assessment: Assessment, name: str) -> list[str | Table]:
    """Sum up for people: a table of the tables, and one of the items with evidence and missing points."""
    sums = Table(
        ["table", "points", "evidenced", "claimed", "missing"],
        [[table.table.title, *map(str, _points(table))] for table in assessment.tables],
        right=(1, 2, 3, 4),
        indent=2,
    )
    facts = [f"  {line}" for line in about(assessment)]
    parts: list[str | Table] = [f"{name}: {verdict(assessment)}", *facts, "", sums]
    for table in assessment.tables:
        note = f" ({table.table.note})" if table.table.note else ""
        rows = [
            [
                result.item.name,
                result.item.priority,
                str(result.item.points),
                *map(_number, (result.evidenced, result.claimed, result.missing)),
                " | ".join(_why(result)),
            ]
            for result in table.results
        ]
        head = ["item", "priority", "points", "evidenced", "claimed", "missing", "evidence, or what is missing"]
        parts += ["", f"{table.table.title}{note}:", Table(head, rows, right=(2, 3, 4, 5), indent=2)]
    return parts


def markdown(assessment: Assessment, name: str) -> list[str]:
    """Markdown for an issue; text of journals and answers is escaped."""
    text = [
        f"## Compute platform quality: {_cell(name)}",
        "",
        f"**{_cell(verdict(assessment))}**",
        "",
        *(f"- {_cell(line)}" for line in about(assessment)),
        f"- Items and points: [PyTorch Compute Platform Quality Levels]({SOURCE})",
        "",
        "| table | points | evidenced | claimed | missing |",
        "|---|---:|---:|---:|---:|",
        *(f"| {table.table.title} | {' | '.join(map(str, _points(table)))} |" for table in assessment.tables),
        f"| **all** | {assessment.most} | {assessment.evidenced} | {assessment.claimed} | {assessment.missing} |",
    ]
    for table in assessment.tables:
        text += ["", f"### {table.table.title}", ""]
        if table.table.note:
            text += [f"Its points: {table.table.note}.", ""]
        text.append("| item | priority | points | evidenced | claimed | evidence, or what is missing |")
        text.append("|---|---|---:|---:|---:|---|")
        for result in table.results:
            item = result.item
            why = "<br>".join(_cell(line) for line in _why(result, link=False))
            link = f"<br>[link]({result.link})" if result.link else ""
            text.append(
                f"| {_cell(item.what)} (`{item.name}`) | {item.priority} | {item.points} | {_number(result.evidenced)} "
                f"| {_number(result.claimed)} | {why}{link} |"
            )
    return text


def as_json(assessments: Sequence[tuple[str, Assessment]]) -> dict[str, Any]:
    """JSON-ready values."""
    return {
        "schema": SCHEMA,
        "source": SOURCE,
        "devices": [
            {
                "name": name,
                "device": assessment.run.device,
                "started": assessment.run.started,
                "journals": list(assessment.run.sources),
                "remarks": list(assessment.run.remarks),
                "level": assessment.level,
                "level-of-evidence": assessment.level_of_evidence,
                "points": assessment.most,
                "evidenced": assessment.evidenced,
                "claimed": assessment.claimed,
                "missing": assessment.missing,
                "unmet-p0": list(assessment.unmet),
                "tables": [
                    {
                        "name": table.table.name,
                        **dict(zip(("points", "evidenced", "claimed", "missing"), _points(table), strict=True)),
                        "items": [
                            {
                                "item": result.item.name,
                                "priority": result.item.priority,
                                "points": result.item.points,
                                **{name: getattr(result, name) for name in _OF_ITEM},
                            }
                            for result in table.results
                        ],
                    }
                    for table in assessment.tables
                ],
            }
            for name, assessment in assessments
        ],
    }


def verdict(assessment: Assessment) -> str:
    """Sum and level, in a line."""
    reached, alone = assessment.level, assessment.level_of_evidence
    return (
        f"{assessment.evidenced} of {assessment.most} points evidenced, {assessment.claimed} claimed, "
        f"{assessment.missing} missing: {reached}" + (f"; by evidence alone {alone}" if reached != alone else "")
    )


def about(assessment: Assessment) -> list[str]:
    """Describe the run, and the needs of the next level."""
    run = assessment.run
    chip = f" ({run.fingerprint.chip}, {run.fingerprint.runtime})" if run.fingerprint is not None else ""
    versions = dict(run.fingerprint.versions) if run.fingerprint is not None else {}
    listed = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    lines = [
        f"{run.device}{chip}; {listed or 'no fingerprint'}; accelcheck {run.accelcheck}, level {run.level}",
        f"{len(run.records):,} cases of {', '.join(run.sources)}, begun {run.started or 'at an unknown time'}",
        *run.remarks,
    ]
    points = assessment.evidenced + assessment.claimed
    if assessment.level == "Engineering":
        lines.append(f"Unstable needs {UNSTABLE} points: {UNSTABLE - points} more")
    if assessment.level != "Stable":
        needs = [f"{STABLE - points} more points"] if points < STABLE else []
        needs += [f"all points of {', '.join(assessment.unmet)}"] if assessment.unmet else []
        lines.append(f"Stable needs {STABLE} points and every item of priority P0: {' and '.join(needs)}")
    if level(points, not assessment.unmet) != "Engineering":
        lines.append("PyTorch's documentation lists a platform at a level that it held for two consecutive releases")
    return lines


def _points(table: TableResult) -> tuple[int, int, int, int]:
    return table.table.points, table.evidenced, table.claimed, table.missing


def _number(points: int) -> str:
    return str(points) if points else "-"


def _why(result: ItemResult, *, link: bool = True) -> list[str]:
    lines = [*result.evidence, *([f"missing: {result.lacking}"] if result.lacking else [])]
    return [*lines, result.link] if link and result.link else lines


def _cell(text: str) -> str:
    """Escape untrusted text for a cell: no markup, no mention, one line."""
    # Entities hold in Markdown's tables and in HTML; not every renderer takes backslashes in a table.
    return _MENTION.sub("@\u200b", _MARKUP.sub(lambda match: f"&#{ord(match[1])};", escaped(text)))
