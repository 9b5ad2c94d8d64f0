"""Summarizes each device for a report, and makes its matrix technique x device. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accelcheck.core.journal import Record
from accelcheck.report.qualification import Qualification, highest, qualification
from accelcheck.report.run import DeviceRun, counts


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
    """The first lines about a device: its run, a verdict in a sentence, and its qualification at its level.

    Attributes:
        state: ``good``: qualifies at its level; ``part``: does not, but all cases are green; ``bad``: some are not.
        not_run: Reasons of cases that did not run, the most frequent one first.
    """

    label: str
    run: DeviceRun
    state: str
    title: str
    qualified: Qualification
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
    asked = qualification(run)
    state = "bad" if not run.green else "good" if asked.holds else "part"
    not_run = _reasons(record for record in run.records if not record.verdict.executed)
    return Standing(label, run, state, _title(run, asked), asked, not_run)


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
    techniques: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for record in records:
        text = record.headline.removeprefix(f"{record.verdict} [{record.code}] ")
        techniques[str(record.verdict), record.code, text].append(record.case.technique)
    ordered = sorted(techniques.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(Reason(*key, len(names), tuple(sorted(set(names)))) for key, names in ordered)
