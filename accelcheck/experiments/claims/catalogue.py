"""Claims as data, read from a file: each with source, workload, figure and kinds of devices. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core import toml
from accelcheck.core.errors import InputError
from accelcheck.core.registry import unknown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from accelcheck.core.capability import Capability

PACKAGED = Path(__file__).with_name("claims.toml")
"""File of the claims that the package ships."""
CLASSES = ("cpu", "gpu", "tpu")
"""Kinds of devices that a claim may be made for."""
WHOLE_PERCENT = 0.005
"""Tolerance for memory, which is claimed in whole percents: a value that rounds to the figure reaches it."""


class ClaimsError(InputError):
    """A file of claims is invalid; the message names file, entry and field."""


class What(StrEnum):
    """The quantity of a claim."""

    SPEED_UP = "speed-up"
    """Time of the plain side divided by the technique's; the figure is a lower bound."""
    EXTRA_TIME = "extra-time"
    """Share by which the technique takes longer; the figure is a lower bound."""
    MEMORY = "memory"
    """Share of the plain side's memory, inputs and parameters included, that it saves; the figure is a lower bound."""
    ERROR = "error"
    """Relative error in the Frobenius norm against FP64; the figure is an upper bound."""
    GROWTH = "growth"
    """Factor by which memory grows when a size doubles; the figure is an upper bound."""

    @property
    def bounded(self) -> bool:
        """True if the figure is an upper bound."""
        return self in {What.ERROR, What.GROWTH}


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        experiment: Name of the experiment that measures it; claims may share one.
        workload: Description of the workload, with published sizes where there are some.
        least: Lower end of the figure; None for a quantity with an upper bound.
        most: Upper end; None if more is better and no range is published.
        classes: Kinds of devices that the claim is about.
        source: URL of the publication; empty if none is known.
        published: Statement of the source, and parts of the claim that it does not state.
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
        figure = self.most if self.what.bounded else self.least
        if figure is None:
            raise ValueError(f"claim {self.name}: expected a figure; create claims by `load`, which checks that")
        return figure


class ClaimStatus(StrEnum):
    """The outcome of a claim."""

    CONFIRMED = "confirmed"
    """The whole interval reaches the figure."""
    NOT_CONFIRMED = "not confirmed"
    """No part of the interval reaches it."""
    UNDECIDED = "undecided"
    """A part of the interval reaches it."""
    NOT_MEASURABLE = "not measurable here"


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure in the unit of the claim's `What`, its interval, and the times or bytes that it follows from."""

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
        reason: Reason why nothing was measured; empty otherwise.
        code: `accelcheck.core.capability.Code` if this device lacks the technique; empty if the attempt failed.
    """

    claim: Claim
    outcome: ClaimStatus
    measured: Measured | None = None
    reason: str = ""
    code: str = ""

    @property
    def broken(self) -> bool:
        """True if the attempt to measure failed: a wrong result, or an error."""
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
    """Read a file of claims; raises `ClaimsError` where it cannot be read, or an entry is not legal.

    Args:
        path: TOML file with a table ``claim`` per claim, with the fields of `Claim`; ``devices`` has its `classes`.
        experiments: Quantities that each experiment measures, by its name.
    """
    claims: dict[str, Claim] = {}
    for entry in toml.read(path, "claim", _FIELDS, ClaimsError):
        claim = _claim(entry, experiments)
        if claim.name in claims:
            raise entry.wrong("name", f"{claim.name!r} is also the name of another claim")
        claims[claim.name] = claim
    if not claims:
        raise ClaimsError(f"{path}: field 'claim': missing; expected a list of tables, [[claim]]")
    return list(claims.values())


_TEXT = toml.Field("a text", toml.is_text)
_FIGURE = toml.Field("a number", lambda value: toml.is_number(value, -math.inf, math.inf), required=False)
_FIELDS = {
    "name": _TEXT,
    "experiment": _TEXT,
    "workload": _TEXT,
    "what": toml.Field(f"one of {', '.join(What)}", lambda value: toml.is_text(value) and value in set(What)),
    "least": _FIGURE,
    "most": _FIGURE,
    "devices": toml.Field(
        f"a list of {', '.join(CLASSES)}", lambda value: toml.is_texts(value) and set(value) <= set(CLASSES)
    ),
    "source": toml.Field(
        "an address that begins with https://, or an empty text",
        lambda value: isinstance(value, str) and (not value or value.startswith("https://")),
    ),
    "published": _TEXT,
}


def _claim(entry: toml.TomlTable, experiments: Mapping[str, Collection[What]]) -> Claim:
    what, experiment = What(entry["what"]), entry["experiment"]
    if experiment not in experiments:
        raise entry.wrong("experiment", str(unknown("experiment", experiment, sorted(experiments))))
    if what not in experiments[experiment]:
        given = ", ".join(sorted(experiments[experiment]))
        raise entry.wrong("what", f"experiment {experiment} measures {given}, not {what}")
    least, most = _figures(entry, what)
    classes, source, published = tuple(entry["devices"]), entry["source"], entry["published"]
    return Claim(entry["name"], experiment, entry["workload"], what, least, most, classes, source, published)


def _figures(entry: toml.TomlTable, what: What) -> tuple[float | None, float | None]:
    low, high = _LEGAL[what]
    for field in ("least", "most"):
        value = entry.values.get(field)
        if value is not None and not low <= value <= high:
            raise entry.wrong(field, f"expected a number from {low:g} to {high:g} for {what}, got {value!r}")
    least, most = entry.values.get("least"), entry.values.get("most")
    if what.bounded and least is not None:
        raise entry.wrong("least", f"a claim of {what} has only an upper end: give 'most'")
    needed = "most" if what.bounded else "least"
    if needed not in entry.values:
        raise entry.wrong(needed, f"missing; expected a number from {low:g} to {high:g} for {what}")
    if least is not None and most is not None and most < least:
        raise entry.wrong("most", f"expected no less than 'least', {least:g}, got {most:g}")
    return None if least is None else float(least), None if most is None else float(most)


_LEGAL = {
    What.SPEED_UP: (0.01, 1e6),
    What.EXTRA_TIME: (0.0, 1e6),
    What.MEMORY: (0.001, 1.0),
    What.ERROR: (1e-12, 1.0),
    What.GROWTH: (1.0, 1e3),
}
"""Range of legal figures, by quantity."""
