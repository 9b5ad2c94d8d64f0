"""What is wrong with ledgers: malformed and expired entries, patterns of no case, entries that say the same. No torch.

With journals also: entries that nothing needs any more, and sizes that are far larger than what was seen.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accelcheck.core.case import Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.plain import text
from accelcheck.expectations.ledger import MOST_FAULTS, Ledger, LedgerError, shown

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from accelcheck.core.journal import Record
    from accelcheck.expectations.ledger import Entry

SOON = 30
"""Days before its expiry in which an entry is named."""
FAR = 10.0
"""An entry that allows more than this times the largest size that was seen allows another fault."""
SEEDS = "-seeds.toml"
"""Ends the name of a ledger that the selftest alone uses, so that no journal shows its entries."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry, and where it stands."""

    path: Path
    number: int
    entry: Entry

    @property
    def where(self) -> str:
        """The file and the number of the entry, for people."""
        return f"{self.path}: entry {self.number}"


@dataclass
class Findings:
    """What was found.

    Attributes:
        wrong: What someone has to change.
        notes: What someone should look at.
        entries: How many were read.
    """

    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: int = 0


def check(
    paths: Iterable[Path], ids: Collection[str], today: dt.date, records: Sequence[Record] | None = None
) -> Findings:
    """Check ledgers.

    Args:
        paths: Of the files.
        ids: Of all cases.
        today: The date.
        records: Of journals; None where none was given.
    """
    found = Findings()
    placed: list[Placed] = []
    for path in paths:
        try:
            entries = Ledger.load((path,)).entries
        except LedgerError as error:
            found.wrong.append(text(error))
            continue
        placed += [Placed(path, number, entry) for number, entry in enumerate(entries, start=1)]
    found.entries = len(placed)
    for one in placed:
        _dates(found, one, today)
    covered = [_covered(found, one, ids) for one in placed]
    found.notes += _same(placed, covered)
    if records is not None:
        _seen(found, placed, covered, records)
    return found


def devices(paths: Iterable[Path]) -> set[str]:
    """The devices that the patterns of ledgers name; those of files that cannot be read are none."""
    found = set[str]()
    for path in paths:
        try:
            entries = Ledger.load((path,)).entries
        except LedgerError:
            continue
        parts = [pattern.split("/") for entry in entries for pattern in entry.cases]
        found |= {part[2] for part in parts if len(part) > 3 and not set("*?[") & set(part[2])}
    return found


def _dates(found: Findings, one: Placed, today: dt.date) -> None:
    left = (one.entry.expires - today).days
    if left <= 0:
        found.wrong.append(
            f"{one.where}: expired on {one.entry.expires}: its cases fail again ({text(one.entry.reason, 200)})"
        )
    elif left <= SOON:
        found.notes.append(
            f"{one.where}: expires in {left} days, on {one.entry.expires} ({text(one.entry.reason, 200)})"
        )


def _covered(found: Findings, one: Placed, ids: Collection[str]) -> set[str]:
    covered = set[str]()
    for pattern in one.entry.cases:
        match = re.compile(fnmatch.translate(pattern)).match
        names = {name for name in ids if match(name)}
        if not names:
            near = difflib.get_close_matches(pattern, _like(pattern, ids), n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]}" if near else ""
            found.wrong.append(f"{one.where}: field 'cases': {text(repr(pattern), 200)} is no case of the matrix{hint}")
        covered |= names
    return covered


def _like(pattern: str, ids: Collection[str]) -> list[str]:
    """The cases that share most parts with a pattern: comparing with all of them would take seconds."""
    parts = pattern.split("/")
    ranked: dict[int, list[str]] = defaultdict(list)
    for name in ids:
        ranked[sum(fnmatch.fnmatchcase(part, glob) for part, glob in zip(name.split("/"), parts, strict=False))].append(
            name
        )
    return sorted(ranked[max(ranked)])[:2000] if ranked else []


def _same(placed: Sequence[Placed], covered: Sequence[set[str]]) -> Iterator[str]:
    """Entries that expect the same of one case."""
    first: dict[tuple[str, str, str], int] = {}
    said = set[tuple[int, int]]()
    for number, (one, names) in enumerate(zip(placed, covered, strict=True)):
        for name in sorted(names):
            other = first.setdefault((name, one.entry.verdict, one.entry.names), number)
            if other != number and (other, number) not in said:
                said.add((other, number))
                yield f"{one.where}: overlaps {placed[other].where}: both have {one.entry.names} for {name}"


@dataclass
class _Seen:
    """What journals show of one entry: the cases that ran, whether one shows it, and the largest size."""

    ran: set[str] = field(default_factory=set)
    needed: bool = False
    largest: float = 0.0


def _seen(found: Findings, placed: Sequence[Placed], covered: Sequence[set[str]], records: Sequence[Record]) -> None:
    """Hold entries against what journals show."""
    seen = [_Seen() for _ in placed]
    both = set[tuple[int, int]]()
    for record in records:
        numbers = [
            number
            for number, one in enumerate(placed)
            if any(fnmatch.fnmatchcase(record.case.id, pattern) for pattern in one.entry.cases)
        ]
        for number in numbers:
            if record.verdict.executed and _whole(record):
                seen[number].ran.add(record.case.id)
        for fault in shown(record):
            hits = [number for number in numbers if placed[number].entry.finds(fault)]
            for number in hits:
                seen[number].needed = True
                seen[number].largest = max(seen[number].largest, fault.size or 0.0)
            pair = tuple(number for number in hits if placed[number].entry.explains(fault))[:2]
            if len(pair) > 1 and pair not in both:
                both.add((pair[0], pair[1]))
                one, other = (placed[number].where for number in pair)
                found.notes.append(f"{other}: overlaps {one}: both expect, in {record.case.id}: {text(fault, 200)}")
    for entry, names, of_entry in zip(placed, covered, seen, strict=True):
        if not entry.path.name.endswith(SEEDS):
            _held(found, entry, names, of_entry)


def _held(found: Findings, one: Placed, names: set[str], seen: _Seen) -> None:
    if seen.ran and not seen.needed:
        idle = f"{one.where}: idle: of its {len(names)} cases {len(seen.ran)} ran, such as {min(seen.ran)}, and none shows it"
        if names <= seen.ran:
            found.wrong.append(f"{idle}: remove it")
        else:
            found.notes.append(idle)
    most = one.entry.at_most
    if seen.largest and isinstance(most, float) and most > FAR * seen.largest:
        found.notes.append(f"{one.where}: field 'at-most': {most:g}, and the largest size seen is {seen.largest:.4g}")


def _whole(record: Record) -> bool:
    """Whether a record shows all faults of its case by their fields: older journals have lines, and expected failures are cut."""
    if any(fault.kind is FaultKind.OTHER for fault in record.faults):
        return False
    return record.verdict is not Verdict.XFAIL or 0 < len(record.faults) < MOST_FAULTS
