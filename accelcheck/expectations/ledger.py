"""The ledger: what a device is known to get wrong, each entry with a reason, a link, an owner and an expiry. No torch."""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelcheck.core.case import Verdict

SCHEMA = 1
FOLDER = Path(__file__).parent / "ledgers"
"""The ledgers that come with accelcheck: ``all.toml`` for what fails everywhere, and one a device, such as ``xla.toml``."""

_FIELDS = {"cases", "verdict", "match", "reason", "link", "owner", "expires"}


class LedgerError(ValueError):
    """A ledger is not what it should be; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One expectation.

    Attributes:
        cases: Case ids or globs, matched against whole ids.
        verdict: ``fail`` or ``error``: what is expected to happen.
        match: Regular expression that a line of the failure must contain; a line that no entry matches is not expected.
        reason: What a maintainer needs to know to act on it.
        link: Where it is reported or documented.
        owner: Who can mend it.
        expires: From this day on the entry counts no more, and its cases fail again.
    """

    cases: tuple[str, ...]
    verdict: Verdict
    match: str
    reason: str
    link: str
    owner: str
    expires: dt.date

    def covers(self, case_id: str, today: dt.date) -> bool:
        """Whether the entry speaks of this case, today."""
        return today < self.expires and any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries that apply to a run."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def load(cls, paths: tuple[Path, ...]) -> Ledger:
        """Read ledgers.

        Raises:
            LedgerError: A file cannot be read or an entry is wrong.
        """
        return cls(tuple(entry for path in paths for entry in _entries(path)))

    def covering(self, case_id: str, today: dt.date | None = None) -> tuple[Entry, ...]:
        """The entries that speak of a case today."""
        day = today or dt.datetime.now(tz=dt.UTC).date()
        return tuple(entry for entry in self.entries if entry.covers(case_id, day))


def foreseen(entries: tuple[Entry, ...], verdict: Verdict, lines: list[str]) -> tuple[Entry, ...]:
    """The entries that explain a failure, if together they explain every line of it; else none.

    A known failure must not hide a new one beside it in the same case.
    """
    relevant = [entry for entry in entries if entry.verdict is verdict]
    explained = [[entry for entry in relevant if re.search(entry.match, line)] for line in lines]
    if not lines or not all(explained):
        return ()
    return tuple(dict.fromkeys(entry for group in explained for entry in group))


def shipped(devices: tuple[str, ...]) -> tuple[Path, ...]:
    """The ledgers that come with accelcheck for these devices: what fails on all of them, and on each."""
    paths = (FOLDER / f"{name}.toml" for name in ("all", *devices))
    return tuple(path for path in paths if path.exists())


def unsteady(device: str) -> Ledger:
    """What a device gets wrong with some seeds only. The suite has one seed a case, and its entries are in `shipped`."""
    path = FOLDER / f"{device}-seeds.toml"
    return Ledger.load((path,)) if path.exists() else Ledger()


def _entries(path: Path) -> list[Entry]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LedgerError(f"the ledger {path} is not TOML: {error}") from error
    if data.get("schema") != SCHEMA:
        raise LedgerError(f"{path}: field 'schema' is {data.get('schema')!r}; this accelcheck reads {SCHEMA}")
    if unknown := sorted(data.keys() - {"schema", "entry"}):
        raise LedgerError(f"{path}: unknown field {', '.join(map(repr, unknown))}; entries are written as [[entry]]")
    entries = data.get("entry", [])
    if not isinstance(entries, list) or not all(isinstance(raw, dict) for raw in entries):
        raise LedgerError(f"{path}: field 'entry' is {entries!r}; entries are written as [[entry]]")
    return [_entry(f"{path}: entry {number}", raw) for number, raw in enumerate(entries, start=1)]


def _entry(where: str, raw: dict[str, Any]) -> Entry:
    if raw.keys() != _FIELDS:
        wrong = sorted(raw.keys() ^ _FIELDS)
        raise LedgerError(
            f"{where}: fields {', '.join(sorted(_FIELDS))} are expected, each once; wrong: {', '.join(wrong)}"
        )
    if raw["verdict"] not in ("fail", "error"):  # no set: what came may not be hashable
        raise LedgerError(f"{where}: field 'verdict' is {raw['verdict']!r}; legal values: fail, error")
    if not isinstance(raw["expires"], dt.date) or isinstance(raw["expires"], dt.datetime):
        raise LedgerError(f"{where}: field 'expires' is {raw['expires']!r}; expected a date such as 2027-06-30")
    globs = raw["cases"]
    if not isinstance(globs, list) or not globs or not all(isinstance(glob, str) and glob for glob in globs):
        raise LedgerError(f"{where}: field 'cases' is {raw['cases']!r}; expected a list of case ids or globs")
    try:
        re.compile(raw["match"])
    except (re.error, TypeError) as error:
        raise LedgerError(f"{where}: field 'match' is not a regular expression: {error}") from error
    if re.search(raw["match"], ""):
        raise LedgerError(
            f"{where}: field 'match' is {raw['match']!r}, which every line contains; expected what is said of this failure"
        )
    for name in ("reason", "link", "owner"):
        if not isinstance(raw[name], str) or not raw[name].strip():
            raise LedgerError(f"{where}: field {name!r} is empty; an expectation without one cannot be acted on")
    return Entry(
        cases=tuple(raw["cases"]),
        verdict=Verdict(raw["verdict"]),
        match=raw["match"],
        reason=raw["reason"].strip(),
        link=raw["link"].strip(),
        owner=raw["owner"].strip(),
        expires=raw["expires"],
    )
