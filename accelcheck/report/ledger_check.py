"""Finds faults of ledgers: malformed and expired entries, patterns that match no case, and overlaps. No torch.

With journals also: entries that no case needs any more, and sizes that are far larger than those seen.
"""

import datetime as dt
import difflib
import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelcheck.core.case import Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import Record
from accelcheck.core.plain import text
from accelcheck.expectations.ledger import MOST_FAULTS, Entry, Ledger, LedgerError, shown

SOON = 30
"""Days before its expiry from which on an entry is named."""
FAR = 10.0
"""Least ratio of an entry's size to the largest seen at which it may allow another fault."""
SEEDS = "-seeds.toml"
"""End of the name of a ledger that the selftest alone uses, so that no journal shows its entries."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry, and its place."""

    path: Path
    number: int
    entry: Entry

    @property
    def where(self) -> str:
        """File and number of the entry."""
        return f"{self.path}: entry {self.number}"


@dataclass
class Findings:
    """The findings about ledgers: faults to correct, remarks to look at, and the number of entries read."""

    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: int = 0


def check(
    paths: Iterable[Path], ids: Collection[str], today: dt.date, records: Sequence[Record] | None = None
) -> Findings:
    """Check ledgers against the ids of all cases; with records of journals also against these."""
    findings = Findings()
    placed: list[Placed] = []
    for path in paths:
        try:
            entries = Ledger.load((path,)).entries
        except LedgerError as error:
            findings.wrong.append(text(error))
            continue
        placed += [Placed(path, number, entry) for number, entry in enumerate(entries, start=1)]
    findings.entries = len(placed)
    for entry in placed:
        _dates(findings, entry, today)
    covered = [_covered(findings, entry, ids) for entry in placed]
    findings.notes += _same(placed, covered)
    if records is not None:
        _seen(findings, placed, covered, records)
    return findings


def devices(paths: Iterable[Path]) -> set[str]:
    """Devices that the patterns of ledgers name; files that cannot be read are left out."""
    names = set[str]()
    for path in paths:
        try:
            entries = Ledger.load((path,)).entries
        except LedgerError:
            continue
        parts = [pattern.split("/") for entry in entries for pattern in entry.cases]
        names |= {part[2] for part in parts if len(part) > 3 and not set("*?[") & set(part[2])}
    return names


def _dates(findings: Findings, placed: Placed, today: dt.date) -> None:
    expires, reason = placed.entry.expires, text(placed.entry.reason, 200)
    left = (expires - today).days
    if left <= 0:
        findings.wrong.append(f"{placed.where}: expired on {expires}: its cases fail again ({reason})")
    elif left <= SOON:
        findings.notes.append(f"{placed.where}: expires in {left} days, on {expires} ({reason})")


def _covered(findings: Findings, placed: Placed, ids: Collection[str]) -> set[str]:
    covered = set[str]()
    for pattern in placed.entry.cases:
        match = re.compile(fnmatch.translate(pattern)).match
        names = {name for name in ids if match(name)}
        if not names:
            near = difflib.get_close_matches(pattern, _like(pattern, ids), n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]}" if near else ""
            glob = text(repr(pattern), 200)
            findings.wrong.append(f"{placed.where}: field 'cases': {glob} is no case of the matrix{hint}")
        covered |= names
    return covered


def _like(pattern: str, ids: Collection[str]) -> list[str]:
    """Cases that share most parts with a pattern; comparing with all of them would take seconds."""
    parts = pattern.split("/")
    ranked: dict[int, list[str]] = defaultdict(list)
    for name in ids:
        alike = sum(fnmatch.fnmatchcase(part, glob) for part, glob in zip(name.split("/"), parts, strict=False))
        ranked[alike].append(name)
    return sorted(ranked[max(ranked)])[:2000] if ranked else []


def _same(placed: Sequence[Placed], covered: Sequence[set[str]]) -> Iterator[str]:
    """Find entries that expect the same of one case."""
    first: dict[tuple[str, str, str], int] = {}
    reported = set[tuple[int, int]]()
    for number, (entry, names) in enumerate(zip(placed, covered, strict=True)):
        for name in sorted(names):
            other = first.setdefault((name, entry.entry.verdict, entry.entry.names), number)
            if other != number and (other, number) not in reported:
                reported.add((other, number))
                yield f"{entry.where}: overlaps {placed[other].where}: both have {entry.entry.names} for {name}"


@dataclass
class _Seen:
    """The journals' evidence about one entry: the cases that ran, whether one needs it, and the largest size."""

    ran: set[str] = field(default_factory=set)
    needed: bool = False
    largest: float = 0.0


def _seen(findings: Findings, placed: Sequence[Placed], covered: Sequence[set[str]], records: Sequence[Record]) -> None:
    """Compare entries with the records of journals."""
    seen = [_Seen() for _ in placed]
    both = set[tuple[int, int]]()
    for record in records:
        numbers = [
            number
            for number, candidate in enumerate(placed)
            if any(fnmatch.fnmatchcase(record.case.id, pattern) for pattern in candidate.entry.cases)
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
                first, second = (placed[number].where for number in pair)
                case = f"{record.case.id}: {text(fault, 200)}"
                findings.notes.append(f"{second}: overlaps {first}: both expect, in {case}")
    for entry, names, of_entry in zip(placed, covered, seen, strict=True):
        if not entry.path.name.endswith(SEEDS):
            _held(findings, entry, names, of_entry)


def _held(findings: Findings, placed: Placed, names: set[str], seen: _Seen) -> None:
    if seen.ran and not seen.needed:
        ran = f"of its {len(names)} cases {len(seen.ran)} ran, such as {min(seen.ran)}, and none shows it"
        idle = f"{placed.where}: idle: {ran}"
        if names <= seen.ran:
            findings.wrong.append(f"{idle}: remove it")
        else:
            findings.notes.append(idle)
    most = placed.entry.at_most
    if seen.largest and isinstance(most, float) and most > FAR * seen.largest:
        size = f"{most:g}, and the largest size seen is {seen.largest:.4g}"
        findings.notes.append(f"{placed.where}: field 'at-most': {size}")


def _whole(record: Record) -> bool:
    """True for a record with all faults of its case; older journals have lines, and expected failures may be cut."""
    if any(fault.kind is FaultKind.OTHER for fault in record.faults):
        return False
    return record.verdict is not Verdict.XFAIL or 0 < len(record.faults) < MOST_FAULTS
