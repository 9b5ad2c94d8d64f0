"""Summarizes each device for a report, and makes its matrix technique x device. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.report.qualification import Qualification, highest, qualification
from accelcheck.report.run import DeviceRun, counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.core.journal import Record


@dataclass(frozen=True, slots=True)
class Reason:
    """Cases, by number and sorted techniques, that share a verdict, a code and the first line of a reason."""

    verdict: str
    code: str
    text: str
    cases: int
    techniques: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """The first lines about a device.

    Attributes:
        state: ``good``: qualifies at its level; ``part``: does not, but all cases are green; ``bad``: some are not.
        title: Verdict in a sentence.
        qualified, reasons: Qualification at its level, in a sentence, and the reasons against it.
        counts: Number of cases by verdict, the worst verdict first.
        compared: Number of elements compared with the oracle.
        absent: Reason for the device's absence; empty where it was there.
        not_run: Reasons of cases that did not run, the most frequent one first.
    """

    label: str
    state: str
    title: str
    qualified: str
    reasons: tuple[str, ...]
    counts: Mapping[str, int]
    executed: int
    compared: int
    absent: str
    not_run: tuple[Reason, ...]

    @property
    def skipped(self) -> int:
        """Number of cases that did not run."""
        return sum(reason.cases for reason in self.not_run)


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """The cases of one technique on one device: counts by verdict, and the code that all of them have."""

    counts: Mapping[str, int]
    code: str


def standing(run: DeviceRun, label: str) -> Standing:
    """Summarize a device."""
    records, asked = run.records, qualification(run)
    return Standing(
        label,
        "bad" if not run.green else "good" if asked.holds else "part",
        _title(run, asked),
        str(asked),
        asked.reasons,
        run.counts(),
        run.executed,
        sum(record.compared for record in records),
        "" if run.fingerprint is not None else run.capability,
        _reasons(record for record in records if not record.verdict.executed),
    )


def matrix(runs: Sequence[DeviceRun]) -> dict[str, list[MatrixCell | None]]:
    """Make a row for each technique, sorted by name, with a cell for each device; None where it has no case."""
    cells: dict[str, list[list[Record]]] = defaultdict(lambda: [[] for _ in runs])
    for place, run in enumerate(runs):
        for record in run.records:
            cells[record.case.technique][place].append(record)
    return {name: [_cell(records) if records else None for records in cells[name]] for name in sorted(cells)}


def _title(run: DeviceRun, asked: Qualification) -> str:
    if not run.executed:
        return "No case was executed"
    against = sum(not record.verdict.green for record in run.records)
    if against:
        return f"Not green: {against:,} of {run.executed:,} executed cases stand{'s' * (against == 1)} against it"
    if asked.holds:
        return f"Qualifies at level {asked.level}"
    lower = highest(run)
    return f"Green, but does not qualify at level {asked.level}{f'; it does at level {lower}' if lower else ''}"


def _cell(records: Sequence[Record]) -> MatrixCell:
    codes = {"" if record.verdict.executed else record.code for record in records}
    return MatrixCell(counts(records), codes.pop() if len(codes) == 1 else "")


def _reasons(records: Iterable[Record]) -> tuple[Reason, ...]:
    tally = Counter[tuple[str, str, str]]()
    techniques = defaultdict(set)
    for record in records:
        key = (str(record.verdict), record.code, record.headline.removeprefix(f"{record.verdict} [{record.code}] "))
        tally[key] += 1
        techniques[key].add(record.case.technique)
    ordered = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Reason(*key, number, tuple(sorted(techniques[key]))) for key, number in ordered)
