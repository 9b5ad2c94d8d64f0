"""Limits that people set on how slow or how large a technique may be, each with its reason. No torch."""

from __future__ import annotations

import fnmatch
import math
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from accelcheck.core.case import Measurement

SCHEMA = 1
_KINDS = ("speed-up-at-least", "memory-at-most", "first-call-at-most")


class LimitError(ValueError):
    """A file of limits is not what it should be; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit.

    Attributes:
        cases: Globs of case ids.
        kind: ``speed-up-at-least`` (times faster than FP32 eager; broken where the whole interval is below),
            ``memory-at-most`` (peak as a part of FP32 eager's), ``first-call-at-most`` (seconds, with cold caches).
        bound: The number.
        reason: Why.
    """

    cases: tuple[str, ...]
    kind: str
    bound: float
    reason: str

    def broken(self, case_id: str, found: Mapping[str, Measurement]) -> str:
        """How a case breaks it, in a line; empty where it does not, or has no such figure."""
        value = self.value(found) if self.covers(case_id) else None
        if value is None or (value >= self.bound if self.kind == "speed-up-at-least" else value <= self.bound):
            return ""
        word = self.kind.replace("-", " ")
        return f"limit: expected {word} {self.bound:g}, got {value:.4g} ({self.reason})"

    def covers(self, case_id: str) -> bool:
        """Whether it is meant for a case."""
        return any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)

    def value(self, found: Mapping[str, Measurement]) -> float | None:
        """The figure that it is held against; None where a case has none."""
        if self.kind == "speed-up-at-least":
            speed_up = found.get("speed-up")
            return None if speed_up is None else speed_up.high
        if self.kind == "memory-at-most":
            own, plain = (found.get(name) for name in ("peak-memory", "peak-memory-fp32-eager"))
            if own is None or plain is None or own.value is None or not plain.value:
                return None
            return own.value / plain.value
        first = found.get("first-call-cold")
        return None if first is None else first.value


def load(paths: Iterable[Path]) -> tuple[Limit, ...]:
    """All limits of some files.

    Raises:
        LimitError: A file cannot be read, or an entry is not what it should be.
    """
    return tuple(limit for path in paths for limit in _load(path))


def _load(path: Path) -> list[Limit]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LimitError(f"{path}: not readable TOML: {error}") from error
    if data.get("schema") != SCHEMA:
        raise LimitError(f"{path}: field 'schema': expected {SCHEMA}, got {data.get('schema')!r}")
    entries = data.get("limit", [])
    if not isinstance(entries, list):
        raise LimitError(f"{path}: field 'limit': expected a list of tables, [[limit]], got {entries!r}")
    return [limit for number, entry in enumerate(entries, 1) for limit in _entry(path, number, entry)]


def _entry(path: Path, number: int, entry: Any) -> list[Limit]:
    def wrong(name: str, expected: str) -> LimitError:
        got = entry.get(name) if isinstance(entry, dict) else entry
        return LimitError(f"{path}: limit {number}: field {name!r}: expected {expected}, got {got!r}")

    if not isinstance(entry, dict):
        raise wrong("limit", "a table")
    for name in entry.keys() - {"cases", "reason", *_KINDS}:
        raise wrong(name, f"one of cases, reason, {', '.join(_KINDS)}")
    cases, reason = entry.get("cases"), entry.get("reason")
    if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
        raise wrong("cases", "a list of case ids or globs")
    if not isinstance(reason, str) or not reason.strip():
        raise wrong("reason", "a sentence")
    found = []
    for kind in _KINDS:
        if kind in entry:
            bound = entry[kind]
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 < bound < math.inf:
                raise wrong(kind, "a positive number")
            found.append(Limit(tuple(cases), kind, float(bound), reason))
    if not found:
        raise wrong(_KINDS[0], f"at least one of {', '.join(_KINDS)}")
    return found
