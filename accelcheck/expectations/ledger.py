"""The ledger: known failures of a device, each with a size, a reason, a link, an owner and an expiry date. No torch.

The size is what an entry has as ``at-most``. For ``verdict = "error"`` it is the name of the exception's class. For ``"fail"``
it is a number, which each line that `match` finds is held against; its unit follows from the kind of the fault:

=====================================  ==================================================================
a view, a regression, any "at most"    measured / allowed: so many times the budget
a NaN or infinity pattern              number of elements that differ
a value of an integer tensor           difference of the first element that differs
a rerun with other bits                relative difference
evidence, metadata, a mutation         none: such entries have ``at-most = 0``, and so cover no fault with a size
=====================================  ==================================================================

The ledgers of accelcheck allow 1.5 times the largest size that was seen, since processors and versions round differently; counts
of elements are exact. ``benchmarks/ledger_sizes.py`` measures the sizes.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core import entry_points, strangers, toml
from accelcheck.core.case import Verdict
from accelcheck.expectations import must_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SCHEMA = 2
_OLDER = "entries of schema 1 had no size: give each an at-most, as docs/ledger.md says"
FOLDER = Path(__file__).parent / "ledgers"
"""The ledgers of accelcheck: ``all.toml`` for failures on every device, and one for each device, such as ``xla.toml``."""

TODO = "TODO"
"""What a text begins with that a person has yet to write."""


def _is_written(value: object) -> bool:
    return isinstance(value, str) and toml.is_text(value) and not value.strip().startswith(TODO)


_TEXT = toml.Field("a text, and no TODO; nobody can act on an expectation without one", _is_written)
_FIELDS = {
    "cases": toml.Field("a list of case ids or globs", toml.is_texts),
    "verdict": toml.Field("fail or error", lambda value: value in ("fail", "error")),  # a tuple: lists have no hash
    "match": toml.Field("a regular expression", lambda value: isinstance(value, str)),
    "at-most": toml.Field(
        "a number of 0 or more for fail (times the budget; 0 for faults without a size), the class of the exception for error",
        lambda value: _is_written(value) or toml.is_number(value, 0.0, sys.float_info.max),
    ),
    "reason": _TEXT,
    "link": _TEXT,
    "owner": _TEXT,
    "chips": toml.Field("a list of chips or globs, as fingerprints name them", toml.is_texts, required=False),
    "expires": toml.Field(
        "a date such as 2027-06-30", lambda value: isinstance(value, dt.date) and not isinstance(value, dt.datetime)
    ),
}


RAISED = ": expected a result, got "
"""Precedes the class and text of an exception in the line of a draw that raised, which starts with ``run: raised``."""


class LedgerError(ValueError):
    """A ledger cannot be read or is malformed; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One expected failure.

    Attributes:
        cases: Case ids or globs, matched against whole ids.
        verdict: ``fail`` or ``error``: the expected verdict.
        match: Regular expression, as RE2 has it, for lines of the failure; a line that no entry matches is not expected.
        at_most: Largest size of a fault that is expected, or the class of an exception: see the module.
        reason: What a maintainer needs to know to act on it.
        link: Where it is reported or documented.
        owner: Who can fix it.
        expires: From this day on the entry does not apply, and its cases fail again.
        chips: Globs of the chips that fail so, as fingerprints name them; empty for all. Chips round differently: what one
            does just beyond a budget, another does just within it.
    """

    cases: tuple[str, ...]
    verdict: Verdict
    match: str
    at_most: float | str
    reason: str
    link: str
    owner: str
    expires: dt.date
    chips: tuple[str, ...] = ()

    def covers(self, case_id: str, today: dt.date) -> bool:
        """Whether the entry applies to this case today."""
        return today < self.expires and any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)

    def on(self, chip: str) -> bool:
        """Whether the entry applies to a chip."""
        return not self.chips or any(fnmatch.fnmatchcase(chip, pattern) for pattern in self.chips)

    def finds(self, line: str, verdict: Verdict) -> bool:
        """Whether `match` finds a line of a failure, whatever its size."""
        said = self._said(line, verdict)
        return said is not None and strangers.pattern(self.match).search(said)

    def explains(self, line: str, verdict: Verdict) -> bool:
        """Whether the entry expects a line of a failure: `match` finds it, and its size is at most `at_most`."""
        if not self.finds(line, verdict):
            return False
        if isinstance(self.at_most, str):
            return str(self._said(line, verdict)).startswith(f"{self.at_most}: ")
        return (size(line) or 0.0) <= self.at_most

    def limit(self, line: str, verdict: Verdict) -> str:
        """What the entry expects of a line that `match` finds, and what came, in words."""
        if isinstance(self.at_most, str):
            return f"expected {self.at_most}, got {str(self._said(line, verdict)).partition(':')[0]}"
        if self.at_most == 0:
            return "the entry has at-most = 0, which covers faults without a size only"
        return f"expected at most {self.at_most:g}{unit(line)}, got {size(line) or 0.0:.4g}"

    def _said(self, line: str, verdict: Verdict) -> str | None:
        """The part of a line that starts with what the entry is about: an exception's class for ``error``; None if it is not."""
        if verdict is self.verdict:
            return line
        # A draw that raised in a case that fails.
        _, raised, error = line.partition(RAISED)
        return error if raised and line.startswith("run: raised") and self.verdict is Verdict.ERROR else None


def unit(line: str) -> str:
    """The unit of the size of a fault, for people; empty where it is a count, or what the line itself says."""
    return " times the budget" if ": view " in line or "at most" in line else ""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All entries that apply to a run.

    Attributes:
        entries: Of all files.
        chips: The chip of each device; None where none is known, and entries apply whatever their chips.
    """

    entries: tuple[Entry, ...] = ()
    chips: Mapping[str, str] | None = None

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
        device = case_id.split("/")[2] if case_id.count("/") == 4 else ""
        chip = None if self.chips is None else self.chips.get(device, "")
        return tuple(entry for entry in self.entries if entry.covers(case_id, day) and (chip is None or entry.on(chip)))

    def of_any_size(self) -> Ledger:
        """The same entries without their limits of size, which are of the suite's seeds."""
        entries = tuple(replace(e, at_most=math.inf) if isinstance(e.at_most, float) else e for e in self.entries)
        return replace(self, entries=entries)

    def expects(self, case_id: str) -> Callable[[str], bool]:
        """Whether a fault of a case is expected, as a function of its line."""
        entries = self.covering(case_id)
        return lambda line: any(entry.explains(line, Verdict.FAIL) for entry in entries)


def foreseen(entries: tuple[Entry, ...], verdict: Verdict, lines: list[str]) -> tuple[Entry, ...]:
    """The entries that explain a failure if together they explain every line of it, else none.

    So a known failure does not hide a new one in the same case, nor one that has grown.
    """
    explained = [[entry for entry in entries if entry.explains(line, verdict)] for line in lines]
    if not lines or not all(explained):
        return ()
    return tuple(dict.fromkeys(entry for group in explained for entry in group))


def outgrown(entries: tuple[Entry, ...], verdict: Verdict, lines: list[str]) -> list[str]:
    """For each line of a failure that is known but larger than any entry expects: what was expected, and what came."""
    said = []
    for line in lines:
        known = [entry for entry in entries if entry.finds(line, verdict)]
        if known and not any(entry.explains(line, verdict) for entry in known):
            most = max(known, key=lambda entry: entry.at_most if isinstance(entry.at_most, float) else -1.0)
            said.append(f"ledger: {most.limit(line, verdict)} ({most.reason}): {line}")
    return said


def size(line: str) -> float | None:
    """The size of a fault, read from its line, in the unit that the module's table says; None where it has none.

    Infinite for NaN, and for any error where the budget is 0.
    """
    for pattern, measure in _SIZES:
        if found := pattern.search(line):
            try:
                value = measure(*found.groups())
            except ValueError:  # words of somebody else, which look like ours
                return None
            return math.inf if math.isnan(value) else value
    return None


def _times(budget: str, got: str) -> float:
    return float(got) / float(budget) if float(budget) else math.inf


def _apart(one: str, other: str) -> float:
    numbers = [complex({"True": "1", "False": "0"}.get(word, word)) for word in (one, other)]
    return abs(numbers[0] - numbers[1])


_NUMBER = r"(-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan)"
_SIZES: tuple[tuple[re.Pattern[str], Callable[..., float]], ...] = (
    (re.compile(rf": expected [^:]*?\bat most {_NUMBER}[^:]*?, got (?:[^,:]*, at most )?{_NUMBER}"), _times),
    (
        re.compile(rf": expected [^:]*?\bat least {_NUMBER}[^:]*?, got {_NUMBER}"),
        lambda least, got: _times(got, least),
    ),
    (re.compile(r": \S+ pattern, (\d+) elements? differ"), float),
    (re.compile(r": not finite: expected numbers, got (\d+)"), float),
    (re.compile(r": value(?: \[[^]]*\]+)?: expected (\S+), got (\S+)$"), _apart),
    (re.compile(rf": rerun: expected the same bits, got {_NUMBER}"), float),
)
"""How a fault's line says its size; the first pattern that it contains counts."""


def shipped(devices: tuple[str, ...]) -> tuple[Path, ...]:
    """Paths of the ledgers for these devices: accelcheck's, that for all devices, and those that packages ship with their devices.

    A package's is the file ``ledgers/DEVICE.toml`` beside the module of the device's entry point.
    """
    paths = [path for name in ("all", *devices) if (path := FOLDER / f"{name}.toml").exists()]
    own = must_pass.stored()
    others = (entry_points.beside(name, FOLDER.name, f"{name}.toml") for name in devices if name not in own)
    return (*paths, *(path for path in others if path is not None))


def unsteady(device: str) -> Ledger:
    """Failures of a device with some seeds only. They concern the selftest: the suite has one seed a case, and uses `shipped`."""
    path = FOLDER / f"{device}-seeds.toml"
    return Ledger.load((path,)) if path.exists() else Ledger()


def _entries(path: Path) -> list[Entry]:
    return [_entry(raw) for raw in toml.read(path, "entry", _FIELDS, LedgerError, SCHEMA, _OLDER)]


def _entry(raw: toml.TomlTable) -> Entry:
    match = raw["match"]
    try:
        empty = strangers.pattern(match).search("")
    except strangers.StrangerError as error:
        raise raw.wrong(
            "match",
            f"expected a regular expression, got {strangers.quoted(match)}: {error} (the syntax is RE2's)",
        ) from error
    if empty:
        raise raw.wrong(
            "match",
            f"expected a text of this failure alone, got {strangers.quoted(match)}, which every line contains",
        )
    verdict, at_most = Verdict(raw["verdict"]), raw["at-most"]
    if isinstance(at_most, str) is not (verdict is Verdict.ERROR):
        wanted = "the class of the exception" if verdict is Verdict.ERROR else "a number"
        raise raw.wrong("at-most", f"expected {wanted} for the verdict {verdict}, got {strangers.quoted(at_most)}")
    return Entry(
        cases=tuple(raw["cases"]),
        verdict=verdict,
        match=match,
        at_most=at_most.strip() if isinstance(at_most, str) else float(at_most),
        reason=raw["reason"].strip(),
        link=raw["link"].strip(),
        owner=raw["owner"].strip(),
        expires=raw["expires"],
        chips=tuple(raw.values.get("chips", ())),
    )
