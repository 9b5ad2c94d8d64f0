"""The ledger: known failures of a device, each with a size, a reason, a link, an owner and an expiry date. No torch.

An entry of verdict ``fail`` names the faults that it expects by their fields; one of verdict ``error`` finds an
exception by a regular expression. Its size, ``at-most``, is the class of the exception for ``error``, and for ``fail``
the largest `Fault.size`, in the unit of its `accelcheck.core.fault.FaultKind`.

The ledgers of accelcheck allow 1.5 times the largest measured size, since processors and versions round differently;
counts of elements are exact. ``benchmarks/ledger_sizes.py`` measures the sizes.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from accelcheck.core import entry_points, strangers, toml
from accelcheck.core.case import Verdict
from accelcheck.core.errors import InputError
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import ErrorCode, Known, Record
from accelcheck.expectations import must_pass

SCHEMA = 3
"""Version of the layout. Schema 2, which is read too, finds the faults of a ``fail`` by ``match`` in their texts."""
_OLDER = "entries of schema 1 had no size: give each an at-most, as docs/ledger.md says"
FOLDER = Path(__file__).parent / "ledgers"
"""The ledgers of accelcheck: ``all.toml`` for every device, and one per device, such as ``xla.toml``."""
TODO = "TODO"
"""Begin of a text that a person has yet to write."""


def _is_written(value: object) -> bool:
    return isinstance(value, str) and toml.is_text(value) and not value.strip().startswith(TODO)


_TEXT = toml.Field("a text, and no TODO; nobody can act on an expectation without one", _is_written)
PARTS = ("path", "view", "draw", "expected", "got")
"""Fields of a fault that an entry may name by globs."""
KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.RAISED)
"""Kinds of faults that an entry may name; entries of verdict ``error`` expect exceptions."""
_GLOBS = toml.Field(
    "a text or a list of texts, in which * stands for any text and ? for one character",
    lambda value: (
        isinstance(value, str)
        or (isinstance(value, list) and bool(value) and all(isinstance(glob, str) for glob in value))
    ),
    required=False,
)
_FIELDS = {
    "cases": toml.Field("a list of case ids or globs", toml.is_texts),
    "verdict": toml.Field("fail or error", lambda value: value in ("fail", "error")),  # a tuple: lists have no hash
    "match": toml.Field("a regular expression", lambda value: isinstance(value, str), required=False),
    "kind": toml.Field(", ".join(KINDS[:-1]) + f" or {KINDS[-1]}", lambda value: value in KINDS, required=False),
    **dict.fromkeys(PARTS, _GLOBS),
    "at-most": toml.Field(
        "a number of 0 or more for fail (times the budget; 0 for faults without a size), "
        "the class of the exception for error",
        lambda value: _is_written(value) or toml.is_number(value, 0.0, sys.float_info.max),
    ),
    "reason": _TEXT,
    "link": _TEXT,
    "owner": _TEXT,
    "chips": toml.Field(
        "a list of globs of the chip and the runtime, as fingerprints name them", toml.is_texts, required=False
    ),
    "expires": toml.Field(
        "a date such as 2027-06-30", lambda value: isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    ),
}


class LedgerError(InputError):
    """A ledger cannot be read or is malformed; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One expected failure.

    Attributes:
        cases: Case ids or globs, matched against whole ids.
        verdict: Expected verdict, ``fail`` or ``error``.
        at_most: Largest size of an expected fault, or the class of an exception: see the module.
        reason: Facts that a maintainer needs in order to act on it.
        link: URL or path of the report or documentation.
        owner: Person or project that can fix it.
        expires: First day on which the entry no longer applies, and its cases fail again.
        chips: Globs of the chips that fail so, and their runtimes, as in ``*, ATen AVX2``; empty for all. Chips round
            differently: one ends just beyond a budget, another just within it.
        match: Regular expression of RE2 for class and text of an exception; in schema 2 also for `str` of a fault.
        kind: Kind of the faults; None where `match` finds them.
        path, view, draw, expected, got: Globs of these fields of the faults, of which one has to fit; none fits all.
    """

    cases: tuple[str, ...]
    verdict: Verdict
    at_most: float | str
    reason: str
    link: str
    owner: str
    expires: dt.date
    chips: tuple[str, ...] = ()
    match: str = ""
    kind: FaultKind | None = None
    path: tuple[str, ...] = ()
    view: tuple[str, ...] = ()
    draw: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    got: tuple[str, ...] = ()

    def covers(self, case_id: str, today: dt.date) -> bool:
        """True if the entry applies to this case today."""
        return today < self.expires and any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)

    def on(self, chip: str) -> bool:
        """True if the entry applies to a chip."""
        return not self.chips or any(fnmatch.fnmatchcase(chip, pattern) for pattern in self.chips)

    def finds(self, fault: Fault) -> bool:
        """True if the entry is about a fault, whatever its size."""
        if (self.verdict is Verdict.ERROR) is not (fault.kind is FaultKind.RAISED):
            return False
        if self.kind is None:
            return strangers.pattern(self.match).search(exception(fault) or str(fault))
        return self.kind is fault.kind and all(_fits(getattr(fault, part), getattr(self, part)) for part in PARTS)

    def explains(self, fault: Fault) -> bool:
        """True if the entry is about a fault whose size is at most `at_most`."""
        if not self.finds(fault):
            return False
        return fault.view == self.at_most if isinstance(self.at_most, str) else (fault.size or 0.0) <= self.at_most

    @property
    def names(self) -> str:
        """The fields of faults that the entry names, in words."""
        if self.kind is None:
            return f"match = {self.match!r}"
        parts = [f"{part} = {' or '.join(map(repr, globs))}" for part in PARTS if (globs := getattr(self, part))]
        return ", ".join([f"kind = {str(self.kind)!r}", *parts])


def exception(fault: Fault) -> str:
    """Class and text of an exception, for `Entry.match`; empty for other faults."""
    return f"{fault.view}: {fault.got}" if fault.kind is FaultKind.RAISED else ""


def _fits(value: str, globs: tuple[str, ...]) -> bool:
    # Paths hold brackets, which are no set of characters here.
    return not globs or any(fnmatch.fnmatchcase(value, glob.replace("[", "[[]")) for glob in globs)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries that apply to a run.

    Attributes:
        entries: Entries of all files.
        chips: Chip and runtime by device; None where unknown: entries then apply whatever their chips.
    """

    entries: tuple[Entry, ...] = ()
    chips: Mapping[str, str] | None = None

    @classmethod
    def load(cls, paths: tuple[Path, ...]) -> Ledger:
        """Read ledgers; raises `LedgerError` where a file cannot be read, or an entry is malformed."""
        files = (toml.read(path, "entry", _FIELDS, LedgerError, (SCHEMA, 2), _OLDER) for path in paths)
        return cls(tuple(_entry(raw) for raws in files for raw in raws))

    def covering(self, case_id: str, today: dt.date | None = None) -> tuple[Entry, ...]:
        """The entries that apply to a case today."""
        day = today or dt.datetime.now(tz=dt.UTC).date()
        device = case_id.split("/")[2] if case_id.count("/") == 4 else ""
        chip = None if self.chips is None else self.chips.get(device, "")
        return tuple(entry for entry in self.entries if entry.covers(case_id, day) and (chip is None or entry.on(chip)))

    def of_any_size(self) -> Ledger:
        """The same entries without limits of size, which hold for the suite's seeds."""
        entries = tuple(replace(e, at_most=math.inf) if isinstance(e.at_most, float) else e for e in self.entries)
        return replace(self, entries=entries)


def shipped(devices: tuple[str, ...]) -> tuple[Path, ...]:
    """Paths of the ledgers for these devices: accelcheck's own, and those that packages ship with their devices.

    The ledger of a package is the file ``ledgers/DEVICE.toml`` beside the module of the device's entry point.
    """
    paths = [path for name in ("all", *devices) if (path := FOLDER / f"{name}.toml").exists()]
    own = must_pass.stored()
    others = (entry_points.beside(name, FOLDER.name, f"{name}.toml") for name in devices if name not in own)
    return (*paths, *(path for path in others if path is not None))


def unsteady(device: str) -> Ledger:
    """Failures of a device with some seeds, for the selftest; the suite has one seed per case, and uses `shipped`."""
    path = FOLDER / f"{device}-seeds.toml"
    return Ledger.load((path,)) if path.exists() else Ledger()


def _entry(raw: toml.TomlTable) -> Entry:
    verdict, at_most = Verdict(raw["verdict"]), raw["at-most"]
    by_text = verdict is Verdict.ERROR or raw.schema == 2
    for name in ("match",) if by_text else ("kind", "path"):
        if name not in raw.values:
            raise raw.wrong(name, f"missing; expected {_FIELDS[name].expected}, for the verdict {verdict}")
    for name in ("kind", *PARTS) if by_text else ("match",):
        if name in raw.values:
            instead = "match finds the text" if by_text else "kind, path and the like name the faults of a fail"
            where = f"for the verdict {verdict} in a ledger of schema {raw.schema}"
            raise raw.wrong(name, f"expected none {where}: {instead}")
    if by_text:
        _searchable(raw)
    if isinstance(at_most, str) is not (verdict is Verdict.ERROR):
        wanted = "the class of the exception" if verdict is Verdict.ERROR else "a number"
        raise raw.wrong("at-most", f"expected {wanted} for the verdict {verdict}, got {strangers.quoted(at_most)}")
    return Entry(
        cases=tuple(raw["cases"]),
        verdict=verdict,
        at_most=at_most.strip() if isinstance(at_most, str) else float(at_most),
        reason=raw["reason"].strip(),
        link=raw["link"].strip(),
        owner=raw["owner"].strip(),
        expires=raw["expires"],
        chips=tuple(raw.values.get("chips", ())),
        match=raw.values.get("match", ""),
        kind=FaultKind(raw["kind"]) if "kind" in raw.values else None,
        **{part: (v,) if isinstance(v := raw[part], str) else tuple(v) for part in PARTS if part in raw.values},
    )


def _searchable(raw: toml.TomlTable) -> None:
    match = raw["match"]
    try:
        empty = strangers.pattern(match).search("")
    except strangers.StrangerError as error:
        got = f"{strangers.quoted(match)}: {error} (the syntax is RE2's)"
        raise raw.wrong("match", f"expected a regular expression, got {got}") from error
    if empty:
        got = f"{strangers.quoted(match)}, which every line contains"
        raise raw.wrong("match", f"expected a text of this failure alone, got {got}")


MOST_FAULTS = 20
"""Largest number of faults that are kept of an expected failure: the first of each path come before the others."""


def hold(record: Record, ledger: Ledger) -> Record:
    """Hold a record against the ledger: expected faults alone give `xfail`, a pass against an entry gives `xpass`.

    A known failure hides neither a new nor a larger one in the same case: `Record.known` then has the outgrown entries.
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
    reason = "; ".join(dict.fromkeys(f"{entry.reason} ({entry.link})" for entry in known))
    paths = [fault.path for fault in faults]
    order = sorted(range(len(faults)), key=lambda number: paths.index(paths[number]) < number)
    kept = tuple(faults[number] for number in order[:MOST_FAULTS])
    return replace(record, verdict=Verdict.XFAIL, reason=reason, faults=kept, known=known, traceback="")


def shown(record: Record) -> tuple[Fault, ...]:
    """The faults of a record that entries explain: those of a `fail`, and the exception of an `error`."""
    if record.verdict is Verdict.ERROR and record.code in {"", ErrorCode.UNDECIDED}:
        kind, _, text = record.reason.partition("\n")[0].partition(": ")
        return (Fault(FaultKind.RAISED, "run", view=kind, got=text),)
    return record.faults if record.verdict in {Verdict.FAIL, Verdict.XFAIL} else ()


def _outgrown(entries: tuple[Entry, ...], faults: tuple[Fault, ...]) -> Iterator[Known]:
    """For each known fault that is larger than any entry expects, the entry that allows most."""
    for fault in faults:
        known = [entry for entry in entries if entry.finds(fault)]
        if known and not any(entry.explains(fault) for entry in known):
            most = max(known, key=lambda entry: entry.at_most if isinstance(entry.at_most, float) else -1.0)
            yield _known(most, fault)


def _known(entry: Entry, fault: Fault | None = None) -> Known:
    return Known(entry.verdict, entry.at_most, entry.reason, entry.link, fault)
