"""Faults as data, which go from the check that finds them through the journal to ledgers and reports. No torch."""

import math
from dataclasses import dataclass
from enum import StrEnum

from accelcheck.core.plain import text

MOST_TEXT = 10_000
"""Longest text of a fault, in characters."""
UNIT = 2.0**-23
"""Error that counts as 1 where nothing is allowed: the rounding unit of float32."""
EXACT = 1e15
"""Bound below which integers are written with all of their digits."""


class FaultKind(StrEnum):
    """Kinds of faults; the comment of each says what its `Fault.view` names."""

    METADATA = "metadata"
    """A tensor's `metadata`, or a part: `missing`, `unexpected`, `device`, `dtype`, `shape`, `strides`, `storage`."""
    PATTERN = "pattern"
    """Misplaced special values: `NaN`, `+Inf`, `-Inf` or `not finite`. The size is the number of elements."""
    VALUE = "value"
    """A wrong exact value; no view, or the broken rule. The size is the difference, where the values are numbers."""
    VIEW = "view"
    """An error beyond its budget: a view such as `row`. The size is measured / allowed, or measured / `UNIT`."""
    RERUN = "rerun"
    """A second run with other bits; no view. The size is the relative difference."""
    MUTATED = "mutated"
    """An input, a parameter, a buffer, a flag, a hook or an earlier result that a run changed; no view."""
    STATE = "state"
    """Global state that is left changed; no view."""
    STALE = "stale"
    """Results of copies that do not follow their source; no view."""
    RAISED = "raised"
    """An exception in one draw of a case: its class. `got` is the first line of its text."""
    EVIDENCE = "evidence"
    """A claim of evidence, the path, that was not seen. The operator, where the claim is that none left the device."""
    REGRESSION = "regression"
    """More than the stored baseline: `time` or `memory`. The size is measured / allowed."""
    LIMIT = "limit"
    """Beyond a limit of the user: its name. The size is measured / allowed, or allowed / measured of a lower limit."""
    RULE = "rule"
    """A broken rule of a technique, such as that of a gradient scaler: the rule in words."""
    OTHER = "other"
    """A line of an older journal, or of a check that gives text: the path is the whole line."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: Kind of the fault; the other fields depend on it, see `FaultKind`.
        path: Path of the tensor in the result, such as ``out[1]['hidden']``, or the thing that is wrong.
        view: The view, the part of the metadata, the special value, the class of the exception, or the rule.
        draw: Name of the draw that shows it, such as ``nan[0]``; empty for the case's own draw.
        expected: Expected result in words; empty where `allowed` says it.
        got: Result in words; empty where `measured` says it.
        measured: Measured number.
        allowed: Largest allowed number, or the smallest one where `at_least`; None without a bound.
        at_least: True when `allowed` is a lower bound.
        place: Index of the worst element, such as ``[3, :]``.
    """

    kind: FaultKind
    path: str
    view: str = ""
    draw: str = ""
    expected: str = ""
    got: str = ""
    measured: float | None = None
    allowed: float | None = None
    at_least: bool = False
    place: str = ""

    def __post_init__(self) -> None:
        for name in ("path", "view", "draw", "expected", "got", "place"):
            object.__setattr__(self, name, text(getattr(self, name), MOST_TEXT))
        for name in ("measured", "allowed"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def size(self) -> float | None:
        """Size in the kind's unit, or in `UNIT` where nothing is allowed; None if it has none, infinite for NaN."""
        if self.measured is None:
            return None
        if self.allowed is None:
            return math.inf if math.isnan(self.measured) else abs(self.measured)
        part, whole = (self.allowed, self.measured) if self.at_least else (self.measured, self.allowed or UNIT)
        return math.inf if not whole or math.isnan(part) or math.isnan(whole) else part / whole

    @property
    def bounded(self) -> bool:
        """True when `size` is a multiple of a bound, and no count or difference."""
        return self.allowed is not None

    @property
    def what(self) -> str:
        """Name of the error in a word or two: of a view, a part of the metadata or a rule, or the kind of the fault."""
        if self.kind is FaultKind.PATTERN and self.view != "not finite":
            return f"{self.view} pattern"
        words = {FaultKind.STATE: "left changed", FaultKind.RAISED: "raised", FaultKind.EVIDENCE: "evidence"}
        return words.get(self.kind) or self.view or str(self.kind)

    def __str__(self) -> str:
        """The fault as one line for people, and for the patterns of older ledgers."""
        if self.kind is FaultKind.OTHER:
            return self.path
        draw = f" [{self.draw}]" if self.draw else ""
        if self.kind is FaultKind.EVIDENCE:
            return f"not engaged: {self.path}{draw}: observed {self.got}"
        place = f" at {self.place}" if self.place else ""
        return f"{self.path}: {self._counted()}{place}{draw}: expected {self._expected()}, got {self._got()}"

    def _counted(self) -> str:
        if self.kind is FaultKind.PATTERN and self.place and self.measured is not None:
            return f"{self.what}, {self.measured:.0f} element{'s' * (self.measured > 1)} differ, first"
        return f"view {self.what}" if self.kind is FaultKind.VIEW else self.what

    def _expected(self) -> str:
        if self.allowed is None:
            return "a result" if self.kind is FaultKind.RAISED else self.expected
        words = f"({self.expected})" if self.kind is FaultKind.LIMIT else self.expected
        return f"at {'least' if self.at_least else 'most'} {self._number(self.allowed)} {words}".rstrip()

    def _got(self) -> str:
        if self.kind is FaultKind.RAISED:
            return f"{self.view}: {self.got}"
        return self.got or (self._number(self.measured) if self.measured is not None else "nothing")

    def _number(self, value: float) -> str:
        """Four digits of a number; all digits of an integer, such as a number of bytes."""
        if self.kind is FaultKind.VIEW:
            return f"{value:.3e}"
        return f"{value:.0f}" if value.is_integer() and abs(value) < EXACT else f"{value:.4g}"
