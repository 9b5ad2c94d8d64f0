"""Reads results of `accelcheck curve --json` and `accelcheck claims --json`, untrusted input, by schema. No torch."""

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from accelcheck.core import bounded
from accelcheck.core.errors import InputError
from accelcheck.core.plain import text
from accelcheck.core.units import duration
from accelcheck.devices.base import Fingerprint, fingerprint_from_json

MOST_BYTES = 16 * bounded.MIB
"""Most bytes of one file: a thousand times the size of the stored ones."""
SCHEMA = 1
"""Version of the layout that is read."""
Word = Annotated[str, msgspec.Meta(max_length=2000)]


class ResultFileError(InputError):
    """A file of results cannot be read; the message names the file, what was expected and what came."""


class CurvePoint(msgspec.Struct):
    """The figures of one form of one chain beside eager; seconds of a call, and the ratio with its interval."""

    count: int
    shapes: Word
    form: Word
    eager: float
    seconds: float
    ratio: float
    low: float
    high: float
    first: float
    graphs: int
    repaid_after_calls: int | None = None


class CurveGap(msgspec.Struct):
    """A measurement that is missing, and the reason."""

    count: int
    shapes: Word
    form: Word
    reason: Word


class Crossing(msgspec.Struct):
    """The break-even: largest slower count, smallest count from which on all are faster, estimate, last count."""

    slower: int | None = None
    faster: int | None = None
    estimate: float | None = None
    last: int | None = None

    def words(self) -> str:
        """Format it for people."""
        if self.last is None:
            return "not measured"
        if self.faster is None:
            return f"not faster up to {self.last} statements"
        if self.slower is None:
            return f"faster at every count from {self.faster} on"
        about = "" if self.estimate is None else f", about {self.estimate:.1f} by interpolation"
        return f"between {self.slower} statements (slower) and {self.faster} (faster){about}"


class _Result(msgspec.Struct):
    schema: int
    kind: Word
    made: Word
    accelcheck: Word
    device: dict[str, Any]

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the measured device."""
        return fingerprint_from_json(self.device)


class CurveResult(_Result):
    """A compile curve of one device."""

    points: Annotated[list[CurvePoint], msgspec.Meta(max_length=10_000)]
    gaps: Annotated[list[CurveGap], msgspec.Meta(max_length=10_000)] = []
    break_even: dict[Word, Crossing] = {}


class ClaimAnswer(msgspec.Struct):
    """A published claim and the result of this device."""

    what: Word
    workload: Word
    outcome: Word
    published: Word = ""
    source: Word = ""
    least: float | None = None
    most: float | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    how: Word = ""
    reason: Word = ""
    devices: list[Word] = []

    def promised(self) -> str:
        """Claimed figure in words."""
        if self.least is None:
            return "" if self.most is None else f"at most {_shown(self.what, self.most)}"
        if self.most is None:
            return f"at least {_shown(self.what, self.least)}"
        return f"{_shown(self.what, self.least)} to {_shown(self.what, self.most)}"

    def measured(self) -> str:
        """Measured figure, with its interval where it has one; empty where nothing was measured."""
        if self.value is None:
            return ""
        shown = _shown(self.what, self.value)
        if self.low is None or self.high is None or self.low == self.high:
            return shown
        return f"{shown} ({_shown(self.what, self.low)} to {_shown(self.what, self.high)})"


class ClaimsResult(_Result):
    """The claims table of one device."""

    claims: dict[Word, ClaimAnswer]


T = TypeVar("T", CurveResult, ClaimsResult)


def curve(path: Path) -> CurveResult:
    """Read a compile curve; a `ResultFileError` where the file cannot be read, or is none."""
    result = _read(path, CurveResult, "curve")
    figures = [figure for point in result.points for figure in (point.ratio, point.low, point.high)]
    if not all(math.isfinite(figure) and figure > 0 for figure in figures):
        raise ResultFileError(f"{path}: expected ratios above 0 in field 'points', got another number")
    return result


def claims(path: Path) -> ClaimsResult:
    """Read a claims table; a `ResultFileError` where the file cannot be read, or is none."""
    return _read(path, ClaimsResult, "claims")


def _read(path: Path, kind: type[T], name: str) -> T:
    try:
        raw = b"".join(line for _, line in bounded.lines(path, MOST_BYTES, MOST_BYTES))
        result = msgspec.json.decode(raw, type=kind, strict=False)  # `inf` and `nan` are texts in JSON
        fingerprint_from_json(result.device)
    except bounded.UnreadableFileError as error:
        raise ResultFileError(str(error)) from error
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise ResultFileError(f"{path}: expected a result of `accelcheck {name} --json`: {text(error, 300)}") from error
    if (result.schema, result.kind) != (SCHEMA, name):
        got = f"kind {text(result.kind, 60)!r} of schema {result.schema}"
        raise ResultFileError(f"{path}: expected a result of kind {name!r} of schema {SCHEMA}, got {got}")
    return result


def _shown(what: str, number: float) -> str:
    """Format a claim's figure in its unit."""
    forms = {"speed-up": "{:.2f}x", "error": "{:.2g} relative", "growth": "{:.3g}x a doubling"}
    if what in {"extra-time", "memory"}:
        return f"{(100 if what == 'extra-time' else -100) * number:+.1f} %"
    return forms.get(what, "{:.3g}").format(number)


def seconds(value: float) -> str:
    """Format a time in its unit; a number that is no time stays as it is."""
    return duration(value) if math.isfinite(value) and value > 0 else str(value)
