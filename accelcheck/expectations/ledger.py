"""The ledger: known failures of a device, each with a reason, a link, an owner and an expiry date. No torch."""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from accelcheck.core import toml
from accelcheck.core.case import Verdict

SCHEMA = 1
FOLDER = Path(__file__).parent / "ledgers"
"""The ledgers of accelcheck: ``all.toml`` for failures on every device, and one for each device, such as ``xla.toml``."""

_TEXT = toml.Field("a text; nobody can act on an expectation without one", toml.is_text)
_FIELDS = {
    "cases": toml.Field("a list of case ids or globs", toml.is_texts),
    "verdict": toml.Field("fail or error", lambda value: value in ("fail", "error")),  # a tuple: lists have no hash
    "match": toml.Field("a regular expression", lambda value: isinstance(value, str)),
    "reason": _TEXT,
    "link": _TEXT,
    "owner": _TEXT,
    "expires": toml.Field(
        "a date such as 2027-06-30", lambda value: isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    ),
}


class LedgerError(ValueError):
    """A ledger cannot be read or is malformed; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One expected failure.

    Attributes:
        cases: Case ids or globs, matched against whole ids.
        verdict: ``fail`` or ``error``: the expected verdict.
        match: Regular expression for lines of the failure; a line that no entry matches is not expected.
        reason: What a maintainer needs to know to act on it.
        link: Where it is reported or documented.
        owner: Who can fix it.
        expires: From this day on the entry does not apply, and its cases fail again.
    """

    cases: tuple[str, ...]
    verdict: Verdict
    match: str
    reason: str
    link: str
    owner: str
    expires: dt.date

    def covers(self, case_id: str, today: dt.date) -> bool:
        """Whether the entry applies to this case today."""
        return today < self.expires and any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries that apply to a run."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def load(cls, paths: tuple[Path, ...]) -> Ledger:
        """Read ledgers.

        Raises:
            LedgerError: A file cannot be read, or an entry is malformed.
        """
        return cls(tuple(entry for path in paths for entry in _entries(path)))

    def covering(self, case_id: str, today: dt.date | None = None) -> tuple[Entry, ...]:
        """The entries that apply to a case today."""
        day = today or dt.datetime.now(tz=dt.UTC).date()
        return tuple(entry for entry in self.entries if entry.covers(case_id, day))


def foreseen(entries: tuple[Entry, ...], verdict: Verdict, lines: list[str]) -> tuple[Entry, ...]:
    """The entries that explain a failure if together they explain every line of it, else none.

    So a known failure does not hide a new one in the same case.
    """
    relevant = [entry for entry in entries if entry.verdict is verdict]
    explained = [[entry for entry in relevant if re.search(entry.match, line)] for line in lines]
    if not lines or not all(explained):
        return ()
    return tuple(dict.fromkeys(entry for group in explained for entry in group))


def shipped(devices: tuple[str, ...]) -> tuple[Path, ...]:
    """Paths of accelcheck's ledgers for these devices, and of the one for all devices."""
    paths = (FOLDER / f"{name}.toml" for name in ("all", *devices))
    return tuple(path for path in paths if path.exists())


def unsteady(device: str) -> Ledger:
    """Failures of a device with some seeds only. They concern the selftest: the suite has one seed a case, and uses `shipped`."""
    path = FOLDER / f"{device}-seeds.toml"
    return Ledger.load((path,)) if path.exists() else Ledger()


def _entries(path: Path) -> list[Entry]:
    return [_entry(raw) for raw in toml.read(path, "entry", _FIELDS, LedgerError, SCHEMA)]


def _entry(raw: toml.TomlTable) -> Entry:
    try:
        empty = re.search(raw["match"], "")
    except re.error as error:
        raise raw.wrong("match", f"expected a regular expression, got {raw['match']!r}: {error}") from error
    if empty:
        raise raw.wrong(
            "match", f"expected a text of this failure alone, got {raw['match']!r}, which every line contains"
        )
    return Entry(
        cases=tuple(raw["cases"]),
        verdict=Verdict(raw["verdict"]),
        match=raw["match"],
        reason=raw["reason"].strip(),
        link=raw["link"].strip(),
        owner=raw["owner"].strip(),
        expires=raw["expires"],
    )
