"""Claims as data, read from a file: each with source, workload, figure and kinds of devices. No torch."""

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
"""File of the claims that the package ships."""
CLASSES = ("cpu", "gpu", "tpu")
"""Kinds of devices that a claim may be made for."""


WHOLE_PERCENT = 0.005
"""Tolerance for memory: it is claimed in whole percents and measured in bytes, so a value that rounds to the figure reaches it."""


class ClaimsError(ValueError):
    """A file of claims is invalid; the message names file, entry and field."""


class What(StrEnum):
    """The quantity of a claim."""

    SPEED_UP = "speed-up"
    """Time of the plain side divided by the technique's; the figure is a lower bound."""
    EXTRA_TIME = "extra-time"
    """Share by which it takes longer; the figure is a lower bound."""
    MEMORY = "memory"
    """Share of the plain side's memory that it saves, inputs and parameters included; the figure is a lower bound."""
    ERROR = "error"
    """Relative error in the Frobenius norm against FP64; the figure is an upper bound."""
    GROWTH = "growth"
    """Factor by which memory grows when a size doubles; the figure is an upper bound."""

    @property
    def bounded(self) -> bool:
        """Whether the figure is an upper bound."""
        return self in {What.ERROR, What.GROWTH}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        name: Name on the command line.
        experiment: Name of the experiment that measures it; claims may share one.
        workload: Description of the workload: sizes as published, or chosen if none were.
        what: Quantity of the figure.
        least: Lower end of the figure; None for a quantity with an upper bound.
        most: Upper end; None if more is better and no range was given.
        classes: Kinds of devices that the claim is about.
        source: Address where the claim is published; empty if none is known.
        published: What the source states, and which parts of the claim it does not.
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
        """The figure to reach or to stay within; for a range, the end that is easier to reach."""
        found = self.most if self.what.bounded else self.least
        if found is None:
            raise ValueError(f"claim {self.name}: expected a figure; create claims by `load`, which checks that")
        return found


class ClaimStatus(StrEnum):
    """The outcome of a claim."""

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
        value: Value in the unit of the claim's `What`.
        low, high: Interval; both equal the value if it is exact.
        how: The times or bytes that it was computed from.
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
        outcome: Outcome of the comparison.
        measured: The measurement; None if there is none.
        reason: Why there is none; empty otherwise.
        code: A value of `accelcheck.core.capability.Code` if this device lacks the technique; empty if the attempt failed.
    """

    claim: Claim
    outcome: ClaimStatus
    measured: Measured | None = None
    reason: str = ""
    code: str = ""

    @property
    def broken(self) -> bool:
        """Whether the attempt to measure failed: a wrong result, or an error."""
        return self.outcome is ClaimStatus.NOT_MEASURABLE and not self.code


def judged(claim: Claim, measured: Measured) -> ClaimResult:
    """Compare a measurement with a claim."""
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
    """The result of a claim about a technique that this device lacks."""
    return ClaimResult(claim, ClaimStatus.NOT_MEASURABLE, reason=str(capability), code=str(capability.code))


def wrong(claim: Claim, fault: str) -> ClaimResult:
    """The result of a claim whose experiment gave a wrong result or an error."""
    return ClaimResult(claim, ClaimStatus.NOT_MEASURABLE, reason=fault)


def load(path: Path, experiments: Mapping[str, Collection[What]]) -> list[Claim]:
    """Read a file of claims.

    Args:
        path: TOML file with a table ``claim`` for each claim, with the fields of `Claim`; ``devices`` has its `classes`.
        experiments: Quantities that each experiment measures, by name.

    Raises:
        ClaimsError: The file cannot be read, or an entry lacks a field, or has an unknown field or an illegal value.
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
            raise ClaimsError(f"{path}: claim {number}: field 'name': {claim.name!r} is also the name of another claim")
        found[claim.name] = claim
    return list(found.values())


_TEXTS = ("name", "experiment", "workload", "what", "published")
_FIELDS = frozenset({*_TEXTS, "least", "most", "devices", "source"})


class _Entry:
    """One entry of a file, which becomes a claim."""

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
                raise self._bad("least", f"a claim of {what} has only an upper end: give 'most'")
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
"""Legal figures of a quantity."""
