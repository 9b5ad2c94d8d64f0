"""Claims as data: read from a file, each with a source, a workload, a figure and whom it was made for. No torch."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.core.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from accelcheck.core.capability import Capability

PACKAGED = Path(__file__).with_name("claims.toml")
"""The claims that come with the package."""
CLASSES = ("cpu", "gpu", "tpu")
"""Kinds of devices that a claim may be made for."""


WHOLE_PERCENT = 0.005
"""Memory is promised in whole percents, and measured to the byte: what rounds to the figure reaches it."""


class ClaimsError(ValueError):
    """A file of claims is not what it should be; the message names file, entry and field."""


class What(StrEnum):
    """Of what a claim gives a figure."""

    SPEED_UP = "speed-up"
    """The other's time as a multiple of the technique's: at least so much."""
    EXTRA_TIME = "extra-time"
    """By which part it takes longer: at least so much."""
    MEMORY = "memory"
    """Which part of the other's memory it saves, what it is given and its parameters counted: at least so much."""
    ERROR = "error"
    """Relative error, in the Frobenius norm, against FP64: at most so much."""
    GROWTH = "growth"
    """By which factor memory grows as a size doubles: at most so much."""

    @property
    def bounded(self) -> bool:
        """Whether less is better."""
        return self in {What.ERROR, What.GROWTH}


@dataclass(frozen=True, slots=True)
class Claim:
    """One promise.

    Attributes:
        name: Its word on the command line.
        experiment: What measures it; several claims may share one.
        workload: What is measured, in words: sizes as published, or chosen where none were.
        what: Of what the figure is.
        least: Lower end of the figure; None for what has an upper one alone.
        most: Upper end; None where more is better and no range was given.
        classes: Kinds of devices that it was made for.
        source: Address where such a claim is published; empty where none is known.
        published: What is said there, and what of the figure is not.
    """

    name: str
    experiment: str
    workload: str
    what: What
    least: float | None
    most: float | None
    classes: tuple[str, ...]
    source: str
    published: str

    @property
    def figure(self) -> float:
        """What a measurement has to reach, or to stay within: of a range, the end that is easier to reach."""
        found = self.most if self.what.bounded else self.least
        if found is None:
            raise ValueError(f"claim {self.name}: expected a figure; make claims by `load`, which sees to that")
        return found


class ClaimStatus(StrEnum):
    """What became of a claim."""

    CONFIRMED = "confirmed"
    """The whole interval reaches the figure."""
    NOT_CONFIRMED = "not confirmed"
    """None of it does."""
    UNDECIDED = "undecided"
    """A part of it does."""
    NOT_MEASURABLE = "not measurable here"


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure.

    Attributes:
        value: In the unit of the claim's `What`.
        low, high: Interval; both the value where it is exact.
        how: What it comes from: times, bytes.
    """

    value: float
    low: float
    high: float
    how: str

    @classmethod
    def exactly(cls, value: float, how: str) -> Measured:
        """A figure without spread."""
        return cls(value, value, value, how)


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """A claim beside what was measured.

    Attributes:
        claim: The claim.
        outcome: What became of it.
        measured: None where it is not measurable.
        reason: Why it is not; empty otherwise.
        code: Of `accelcheck.core.capability.Code` where it does not exist here; empty where it was tried, and something is wrong.
    """

    claim: Claim
    outcome: ClaimStatus
    measured: Measured | None = None
    reason: str = ""
    code: str = ""

    @property
    def broken(self) -> bool:
        """Whether it should have been measurable: a wrong result, or an error."""
        return self.outcome is ClaimStatus.NOT_MEASURABLE and not self.code


def judged(claim: Claim, measured: Measured) -> ClaimResult:
    """Hold a measurement against a claim."""
    if not math.isfinite(measured.low) or not math.isfinite(measured.high):
        return wrong(claim, f"expected a finite figure, got {measured.low} to {measured.high}")
    if claim.what.bounded:
        reached, missed = measured.high <= claim.figure, measured.low > claim.figure
    else:
        owed = claim.figure - (WHOLE_PERCENT if claim.what is What.MEMORY else 0.0)
        reached, missed = measured.low >= owed, measured.high < owed
    outcome = ClaimStatus.CONFIRMED if reached else ClaimStatus.NOT_CONFIRMED if missed else ClaimStatus.UNDECIDED
    return ClaimResult(claim, outcome, measured)


def absent(claim: Claim, capability: Capability) -> ClaimResult:
    """A claim about what does not exist here."""
    return ClaimResult(claim, ClaimStatus.NOT_MEASURABLE, reason=str(capability), code=str(capability.code))


def wrong(claim: Claim, fault: str) -> ClaimResult:
    """A claim about what exists here, and does not do what it should."""
    return ClaimResult(claim, ClaimStatus.NOT_MEASURABLE, reason=fault)


def load(path: Path, experiments: Mapping[str, Collection[What]]) -> list[Claim]:
    """Read a file of claims.

    Args:
        path: TOML: a table ``claim`` for each, with the fields of `Claim`, ``devices`` being its `classes`.
        experiments: What each experiment has a figure of, by name.

    Raises:
        ClaimsError: The file cannot be read, or an entry lacks a field, has one that is not known, or a value that is not legal.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClaimsError(f"{path}: cannot be read: {error}") from error
    entries = data.get("claim")
    if set(data) != {"claim"} or not isinstance(entries, list) or not entries:
        raise ClaimsError(
            f"{path}: expected tables [[claim]] and nothing else, got {', '.join(sorted(data)) or 'nothing'}"
        )
    found: dict[str, Claim] = {}
    for number, entry in enumerate(entries, start=1):
        claim = _Entry(path, number, entry).claim(experiments)
        if claim.name in found:
            raise ClaimsError(f"{path}: claim {number}: field 'name': {claim.name!r} is the name of another one")
        found[claim.name] = claim
    return list(found.values())


_TEXTS = ("name", "experiment", "workload", "what", "published")
_FIELDS = frozenset({*_TEXTS, "least", "most", "devices", "source"})


class _Entry:
    """One entry of a file, on its way to a claim."""

    def __init__(self, path: Path, number: int, entry: Any) -> None:
        self._entry = entry
        name = entry.get("name") if isinstance(entry, dict) else None
        self._where = f"{path}: claim {number}" + (f" ({name})" if isinstance(name, str) else "")
        if not isinstance(entry, dict):
            raise self._bad("claim", f"expected a table, got {type(entry).__name__}")

    def claim(self, experiments: Mapping[str, Collection[What]]) -> Claim:
        entry = self._entry
        for field in sorted(set(entry) - _FIELDS):
            raise self._bad(field, f"unknown; legal are {', '.join(sorted(_FIELDS))}")
        texts = {field: self._text(field) for field in _TEXTS}
        if texts["what"] not in set(What):
            raise self._bad("what", f"expected one of {', '.join(What)}, got {texts['what']!r}")
        what = What(texts["what"])
        if texts["experiment"] not in experiments:
            raise self._bad("experiment", str(unknown("experiment", texts["experiment"], sorted(experiments))))
        if what not in experiments[texts["experiment"]]:
            given = ", ".join(sorted(experiments[texts["experiment"]]))
            raise self._bad("what", f"experiment {texts['experiment']} measures {given}, not {what}")
        least, most = self._figure(what)
        return Claim(
            texts["name"],
            texts["experiment"],
            texts["workload"],
            what,
            least,
            most,
            self._classes(),
            self._source(),
            texts["published"],
        )

    def _text(self, field: str) -> str:
        value = self._value(field)
        if not isinstance(value, str) or not value.strip():
            raise self._bad(field, f"expected a text, got {value!r}")
        return value

    def _value(self, field: str) -> Any:
        if field not in self._entry:
            raise self._bad(field, "missing")
        return self._entry[field]

    def _figure(self, what: What) -> tuple[float | None, float | None]:
        least, most = (self._number(field, what) for field in ("least", "most"))
        if what.bounded:
            if least is not None:
                raise self._bad("least", f"a claim of {what} has an upper end alone: give 'most'")
            if most is None:
                raise self._bad("most", "missing")
        elif least is None:
            raise self._bad("least", "missing")
        elif most is not None and most < least:
            raise self._bad("most", f"expected no less than 'least', {least:g}, got {most:g}")
        return least, most

    def _number(self, field: str, what: What) -> float | None:
        value = self._entry.get(field)
        if value is None:
            return None
        low, high = _LEGAL[what]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self._bad(field, f"expected a number from {low:g} to {high:g} for {what}, got {value!r}")
        return float(value)

    def _classes(self) -> tuple[str, ...]:
        value = self._value("devices")
        if not isinstance(value, list) or not value or not set(map(str, value)) <= set(CLASSES):
            raise self._bad("devices", f"expected a list of {', '.join(CLASSES)}, got {value!r}")
        return tuple(value)

    def _source(self) -> str:
        value = self._value("source")
        if not isinstance(value, str) or (value and not value.startswith("https://")):
            raise self._bad("source", f"expected an address that begins with https://, or an empty text; got {value!r}")
        return value

    def _bad(self, field: str, what: str) -> ClaimsError:
        return ClaimsError(f"{self._where}: field {field!r}: {what}")


_LEGAL = {
    What.SPEED_UP: (0.01, 1e6),
    What.EXTRA_TIME: (0.0, 1e6),
    What.MEMORY: (0.001, 1.0),
    What.ERROR: (1e-12, 1.0),
    What.GROWTH: (1.0, 1e3),
}
"""Figures that make sense."""
