"""Limits that users set on the time and memory of a technique, each with a reason. No torch."""

import fnmatch
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelcheck.core import toml
from accelcheck.core.case import Measurement
from accelcheck.core.errors import InputError
from accelcheck.core.fault import Fault, FaultKind

SCHEMA = 1
KINDS = ("speed-up-at-least", "memory-at-most", "first-call-at-most")
_BOUND = toml.Field(
    "a positive number", lambda value: toml.is_number(value, 5e-324, sys.float_info.max), required=False
)
_FIELDS = {
    "cases": toml.Field("a list of case ids or globs", toml.is_texts),
    "reason": toml.Field("a sentence", toml.is_text),
    **dict.fromkeys(KINDS, _BOUND),
}


class LimitError(InputError):
    """A file of limits cannot be read or is malformed; the message names the file, the entry and the field."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, of the cases that some globs match, and the reason for which it was set.

    Its kind is ``speed-up-at-least`` (FP32 eager's time divided by the technique's; broken if all of the interval is
    below), ``memory-at-most`` (peak divided by FP32 eager's), or ``first-call-at-most`` (seconds, with cold caches).
    """

    cases: tuple[str, ...]
    kind: str
    bound: float
    reason: str

    def broken(self, case_id: str, found: Mapping[str, Measurement]) -> Fault | None:
        """The fault of a case that breaks the limit; None where it does not, or has no such figure."""
        value = self.value(found) if self.covers(case_id) else None
        least = self.kind == "speed-up-at-least"
        if value is None or (value >= self.bound if least else value <= self.bound):
            return None
        name = self.kind.rpartition("-at-")[0].replace("-", " ")
        return Fault(
            FaultKind.LIMIT, "limit", name, expected=self.reason, measured=value, allowed=self.bound, at_least=least
        )

    def covers(self, case_id: str) -> bool:
        """True if the limit applies to a case."""
        return any(fnmatch.fnmatchcase(case_id, pattern) for pattern in self.cases)

    def value(self, found: Mapping[str, Measurement]) -> float | None:
        """The figure that the limit applies to; None where the case has none."""
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
    """Read the limits of files; raises `LimitError` where one cannot be read, or an entry is malformed."""
    limits: list[Limit] = []
    for entry in (entry for path in paths for entry in toml.read(path, "limit", _FIELDS, LimitError, SCHEMA)):
        kinds = [kind for kind in KINDS if kind in entry.values]
        if not kinds:
            raise entry.wrong(KINDS[0], f"missing; expected at least one of {', '.join(KINDS)}")
        limits += [Limit(tuple(entry["cases"]), kind, float(entry[kind]), entry["reason"]) for kind in kinds]
    return tuple(limits)
