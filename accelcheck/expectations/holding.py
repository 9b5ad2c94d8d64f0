"""Holds a verdict against the ledger. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Known, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcheck.expectations.ledger import Entry, Ledger

MOST_FAULTS = 20
"""Faults that are kept of a failure that is expected."""


def hold(record: Record, ledger: Ledger) -> Record:
    """Hold a record against the ledger: a failure that it expects whole is `xfail`, a pass that it expects to fail `xpass`.

    So a known failure does not hide a new one in the same case, nor one that has grown: `Record.known` then has what the entries expect.
    """
    entries = ledger.covering(record.case.id)
    if not entries:
        return record
    if record.verdict is Verdict.PASS:
        reason = "passes: remove the entry from the ledger"
        return replace(record, verdict=Verdict.XPASS, reason=reason, known=tuple(map(_known, entries)))
    faults = shown(record)
    explained = [[entry for entry in entries if entry.explains(fault)] for fault in faults]
    if not faults or not all(explained):
        return replace(record, known=tuple(_outgrown(entries, faults)))
    known = tuple(dict.fromkeys(_known(entry) for group in explained for entry in group))
    reason = "; ".join(dict.fromkeys(f"{one.reason} ({one.link})" for one in known))
    return replace(record, verdict=Verdict.XFAIL, reason=reason, faults=faults[:MOST_FAULTS], known=known, traceback="")


def shown(record: Record) -> tuple[Fault, ...]:
    """The faults of a record that entries are held against: those of a `fail`, and the exception of an `error`."""
    if record.verdict is Verdict.ERROR and not record.code:
        kind, _, said = record.reason.partition("\n")[0].partition(": ")
        return (Fault(FaultKind.RAISED, "run", view=kind, got=said),)
    return record.faults if record.verdict in {Verdict.FAIL, Verdict.XFAIL} else ()


def _outgrown(entries: tuple[Entry, ...], faults: tuple[Fault, ...]) -> Iterator[Known]:
    """For each fault that is known but larger than any entry expects: the entry that allows most."""
    for fault in faults:
        known = [entry for entry in entries if entry.finds(fault)]
        if known and not any(entry.explains(fault) for entry in known):
            most = max(known, key=lambda entry: entry.at_most if isinstance(entry.at_most, float) else -1.0)
            yield _known(most, fault)


def _known(entry: Entry, fault: Fault | None = None) -> Known:
    return Known(entry.verdict, entry.at_most, entry.reason, entry.link, fault)
