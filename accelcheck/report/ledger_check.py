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
from accelcheck.core.plain import text
from accelcheck.expectations.ledger import Ledger, LedgerError, size

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
_MORE = re.compile(r"\(\d+ more lines\)")


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry, and where it stands."""

    where: str
    entry: Entry


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
        placed += [Placed(f"{path}: entry {number}", entry) for number, entry in enumerate(entries, start=1)]
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
            other = first.setdefault((name, one.entry.verdict, one.entry.match), number)
            if other != number and (other, number) not in said:
                said.add((other, number))
                yield f"{one.where}: overlaps {placed[other].where}: both have the pattern {one.entry.match!r} for {name}"


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
        lines, whole = _shown(record)
        for number in numbers:
            if record.verdict.executed and whole:
                seen[number].ran.add(record.case.id)
        for index, line in enumerate(lines):
            hits = {number: hit for number in numbers if (hit := _hit(placed[number].entry, record, index, line))}
            for number in hits:
                seen[number].needed = True
                seen[number].largest = max(seen[number].largest, size(line) or 0.0)
            pair = tuple(number for number, hit in hits.items() if placed[number].entry.explains(line, hit))[:2]
            if len(pair) > 1 and pair not in both:
                both.add((pair[0], pair[1]))
                one, other = (placed[number].where for number in pair)
                found.notes.append(f"{other}: overlaps {one}: both expect, in {record.case.id}: {text(line, 200)}")
    for one_entry, names, shown in zip(placed, covered, seen, strict=True):
        if not one_entry.where.partition(": entry ")[0].endswith(SEEDS):
            _held(found, one_entry, names, shown)


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


def _hit(entry: Entry, record: Record, index: int, line: str) -> Verdict | None:
    """The verdict as whose line an entry finds a line of a record; None if it does not."""
    known = (
        record.verdict is Verdict.XFAIL
    )  # a record says what it was expected to be, not whether that was a failure or an error
    for verdict in (Verdict.FAIL, Verdict.ERROR) if known else (record.verdict,):
        if (verdict is Verdict.FAIL or index == 0) and entry.finds(line, verdict):
            return verdict
    return None


def _shown(record: Record) -> tuple[list[str], bool]:
    """The lines of the faults of a record, and whether these are all."""
    lines = record.reason.splitlines()
    if record.verdict is Verdict.XFAIL:  # the reasons of the entries, then the lines of the failure
        return lines[1:], not any(map(_MORE.fullmatch, lines))
    return (lines, True) if record.verdict in {Verdict.FAIL, Verdict.ERROR} else ([], True)
