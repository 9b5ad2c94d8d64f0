"""Compares two runs: verdicts, errors, speed and coverage. No torch.

Worse for the same device are:

- a worse verdict than before, in the order of `accelcheck.report.run.BAD_FIRST`; also one that the ledger now expects;
- a case that ran before, and does not run now;
- an error in a gating view that has grown, of the same tensor: see `GROWTH`;
- a figure of speed that is worse beyond both intervals. Times are compared where the fingerprints are the same, and
  count where neither run waited for a core; ratios to eager are always compared.

Across devices a case is worse that is right on the first and not on the second. All other differences are shown, and
count nothing.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from accelcheck.core.case import Case, Figure, Verdict
from accelcheck.core.journal import Record
from accelcheck.measure.gate import BUSY
from accelcheck.report.run import BAD_FIRST, DeviceRun, labels, measurement
from accelcheck.verify.precision import SLACK, UNIT_ROUNDOFF

GROWTH = SLACK
"""Least ratio of a grown error to the old one; it must also exceed the errors of eager and of all rounding samples.

A budget is as many times their largest error, so two right implementations may differ by this ratio.
"""
RELATIVE = ("row", "column", "block", "element", "gain")
"""Views relative to the oracle's size; divided by 2 u they are in units in the last place."""
ULPS = ("tail", "bias")
"""Views in units in the last place."""
HIGHER_IS_BETTER = {"latency": False, "speed-up": True, "speed-up-same-precision": True}
"""Figures with an interval."""
ABSOLUTE = frozenset({"latency"})
"""Figures that say something only on the same device; the others are ratios to eager in the same process."""
NOT_THERE = "not in the run"
_RANK = {verdict: rank for rank, verdict in enumerate(BAD_FIRST)} | {
    Verdict.XPASS: BAD_FIRST.index(Verdict.PASS)  # its result is right, and the ledger's entry outdated
}


class Aspect(StrEnum):
    """The kind of a difference."""

    VERDICT = "verdict"
    LOST = "coverage lost"
    GAINED = "coverage gained"
    ERROR = "error grown"
    SPEED = "speed"


@dataclass(frozen=True, slots=True)
class CaseChange:
    """A difference between two runs of a case.

    Attributes:
        devices: The device, or both with an arrow.
        case: Its id; across devices without the device.
        what: ``PATH: VIEW`` of an error; name of a figure of speed; else empty.
        before, after: Verdicts, errors in units in the last place, or figures of speed with their intervals.
        factor: New error or figure of speed divided by the old one; infinite where there was no error.
        reason: First line of a case's reason; of errors and speed, the reason why it does not count.
    """

    kind: Aspect
    devices: str
    case: str
    worse: bool
    what: str
    before: str
    after: str
    factor: float | None
    reason: str
    reproduction: str


@dataclass(frozen=True, slots=True)
class DevicePair:
    """Two compared devices, or a device at two times.

    Attributes:
        old, new: Their labels; one is empty where the other run lacks the device.
        same: True where chip, count, driver, runtime, versions and environment are the same.
        both: Number of cases that ran on both.
        across: True for different devices, of which verdicts alone count.
        reproduction: Makes the command that runs a case, with the model and the modules of the later run.
    """

    old: str
    new: str
    same: bool
    both: int
    across: bool
    reproduction: Callable[[Case], str] = field(compare=False)

    @property
    def name(self) -> str:
        """The device, or both with an arrow."""
        return self.old if self.old == self.new else f"{self.old or '-'} -> {self.new or '-'}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences of two runs: worse ones first, then by kind, device and case."""

    across: bool
    pairs: tuple[DevicePair, ...]
    changes: tuple[CaseChange, ...]

    @property
    def worse(self) -> int:
        """Number of changes that count."""
        return sum(change.worse for change in self.changes)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Count the changes of each kind, and those that count as worse."""
        all_counts = Counter(change.kind for change in self.changes)
        counting = Counter(change.kind for change in self.changes if change.worse)
        return {str(kind): (all_counts[kind], counting[kind]) for kind in Aspect if all_counts[kind]}

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values; a factor that is not finite is a text."""
        changes = [asdict(change) for change in self.changes]
        for change in changes:
            if change["factor"] is not None and not math.isfinite(change["factor"]):
                change["factor"] = str(change["factor"])
        return {
            "schema": 1,
            "kind": "diff",
            "across": self.across,
            "growth": GROWTH,
            "worse": self.worse,
            "counts": {kind: {"all": every, "worse": worse} for kind, (every, worse) in self.counts().items()},
            "pairs": [{name: getattr(p, name) for name in ("old", "new", "same", "both")} for p in self.pairs],
            "changes": changes,
        }


_Key = tuple[str, str, str, str]
_Side = tuple[str, "DeviceRun | None"]


def compare(old: Sequence[DeviceRun], new: Sequence[DeviceRun], *, across: bool = False) -> Difference:
    """Compare two runs.

    Each device of `old` is compared with each other one of `new` if `across`, or if no device is in both.
    """
    across = across or not {run.device for run in old} & {run.device for run in new}
    pairs: list[DevicePair] = []
    changes: list[CaseChange] = []
    for (old_name, was), (new_name, now) in _pairs(old, new, across=across):
        later = now or was
        assert later is not None
        prints = [run.fingerprint if run is not None else None for run in (was, now)]
        same = prints[0] is not None and prints[0] == prints[1]
        pair = DevicePair(old_name, new_name, same, len(_ran(was) & _ran(now)), across, later.reproduction)
        pairs.append(pair)
        changes += _changes(pair, _keyed(was), _keyed(now))
    order = list(Aspect)
    changes.sort(key=lambda c: (not c.worse, order.index(c.kind), c.devices, c.case, c.what))
    return Difference(across, tuple(pairs), tuple(changes))


def _pairs(old: Sequence[DeviceRun], new: Sequence[DeviceRun], *, across: bool) -> Iterator[tuple[_Side, _Side]]:
    olds, news = dict(zip(labels(old), old, strict=True)), dict(zip(labels(new), new, strict=True))
    if across:
        every = [((a, olds[a]), (b, news[b])) for a in olds for b in news]
        yield from [pair for pair in every if pair[0][0] != pair[1][0]] or every
        return
    for name in [name for name in olds if name in news]:
        yield (name, olds.pop(name)), (name, news.pop(name))
    # A label has chip and version where one file holds several devices of a name, and the other need not.
    for name, run in list(olds.items()):
        alike = [other for other in news if news[other].device == run.device]
        if len(alike) == 1 and sum(mate.device == run.device for mate in olds.values()) == 1:
            yield (name, olds.pop(name)), (alike[0], news.pop(alike[0]))
    yield from (((name, run), ("", None)) for name, run in olds.items())
    yield from ((("", None), (name, run)) for name, run in news.items())


def _keyed(run: DeviceRun | None) -> dict[_Key, Record]:
    records = run.records if run is not None else ()
    return {(r.case.technique, r.case.workload, r.case.dtype, str(r.case.mode)): r for r in records}


def _ran(run: DeviceRun | None) -> set[_Key]:
    return {key for key, record in _keyed(run).items() if record.verdict.executed}


def _changes(pair: DevicePair, old: Mapping[_Key, Record], new: Mapping[_Key, Record]) -> Iterator[CaseChange]:
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        ran, runs = (record is not None and record.verdict.executed for record in (before, after))
        if ran and runs and before is not None and after is not None:
            yield from _both(pair, before, after)
        elif (ran or runs) and (shown := before if ran else after) is not None:
            kind = Aspect.LOST if ran else Aspect.GAINED
            yield _change(
                kind,
                pair,
                after if after is not None else shown,
                worse=ran and not pair.across,
                before=str(before.verdict) if before is not None else NOT_THERE,
                after=str(after.verdict) if after is not None else NOT_THERE,
            )


def _both(pair: DevicePair, before: Record, after: Record) -> Iterator[CaseChange]:
    worse = _RANK[after.verdict] < _RANK[before.verdict]
    if pair.across:
        worse = _right(before) and not _right(after)
    if before.verdict is not after.verdict:
        yield _change(Aspect.VERDICT, pair, after, worse=worse, before=str(before.verdict), after=str(after.verdict))
    yield from _grown(pair, before, after)
    for name in HIGHER_IS_BETTER:
        if pair.same or name not in ABSOLUTE:
            yield from _sped(pair, before, after, name)


def _sped(pair: DevicePair, before: Record, after: Record, name: str) -> Iterator[CaseChange]:
    first, second = _measured(before, name), _measured(after, name)
    if first is None or second is None or not (second.low > first.high or second.high < first.low):
        return
    measured = [m for record in (before, after) for m in record.measurements]
    waited = max((m.value or 0.0 for m in measured if m.name == "waited"), default=0.0)
    busy = name in ABSOLUTE and waited > BUSY
    yield _change(
        Aspect.SPEED,
        pair,
        after,
        worse=not pair.across and not busy and (second.value > first.value) is not HIGHER_IS_BETTER[name],
        what=name,
        before=str(first),
        after=str(second),
        factor=_over(second.value, first.value),
        reason=f"waited for a core {waited:.0%} of the time: does not count" if busy else "",
    )


def _right(record: Record) -> bool:
    return record.verdict in {Verdict.PASS, Verdict.XPASS}


def _change(
    aspect: Aspect,
    pair: DevicePair,
    record: Record,
    *,
    worse: bool,
    before: str,
    after: str,
    what: str = "",
    factor: float | None = None,
    reason: str = "",
) -> CaseChange:
    case = record.case
    name = case.id if pair.old == pair.new else f"{case.technique}/{case.workload}/{case.dtype}/{case.mode}"
    if aspect not in {Aspect.ERROR, Aspect.SPEED} and record.verdict is not Verdict.PASS:
        reason = record.headline
    return CaseChange(aspect, pair.name, name, worse, what, before, after, factor, reason, pair.reproduction(case))


def _grown(pair: DevicePair, before: Record, after: Record) -> Iterator[CaseChange]:
    """Find the figure that has grown most; those that count come first.

    A record has the figure of each view that is closest to its budget, and those beyond. A path that was not recorded
    before used no larger a part of its budget than the recorded one, which bounds its error if the budget is the same.
    """
    was = {(figure.path, figure.view): figure.measured for figure in before.figures}
    most: dict[str, float] = {}
    for figure in before.figures:
        most[figure.view] = max(most.get(figure.view, 0.0), figure.used)
    grown: list[tuple[bool, float, Figure, float, bool]] = []
    for figure in after.figures:
        view = figure.view
        if view not in most or not (view in RELATIVE or view in ULPS):
            continue
        bound = (figure.path, view) not in was
        old = most[view] * figure.allowed if bound else was[figure.path, view]
        if figure.measured > figure.allowed / SLACK and figure.measured >= GROWTH * old:
            grown.append((figure.gates and not bound, _over(figure.measured, old), figure, old, bound))
    if not grown:
        return
    counts, factor, figure, old, bound = max(grown, key=lambda entry: entry[:2])
    yield _change(
        Aspect.ERROR,
        pair,
        after,
        worse=counts and not pair.across,
        what=f"{figure.path}: {figure.view}",
        before=("at most " if bound else "") + _ulps(after, figure, old),
        after=_ulps(after, figure, figure.measured),
        factor=factor,
        reason="another tensor was worse before: does not count"
        if bound
        else ""
        if counts
        else "gates nothing: does not count",
    )


def _ulps(record: Record, figure: Figure, value: float) -> str:
    unit = 2 * UNIT_ROUNDOFF[record.case.dtype] if record.case.dtype in UNIT_ROUNDOFF else 0.0
    if figure.view in ULPS or not unit:
        return f"{value:.3g}" + (" ulp" if figure.view in ULPS else "")
    return f"{value / unit:.3g} ulp"


@dataclass(frozen=True, slots=True)
class _Interval:
    value: float
    low: float
    high: float
    unit: str

    def __str__(self) -> str:
        scale, unit = (1000.0, "ms") if self.unit == "s" else (1.0, self.unit)
        return f"{scale * self.value:.4g} {unit} ({scale * self.low:.4g} to {scale * self.high:.4g})"


def _measured(record: Record, name: str) -> _Interval | None:
    m = measurement(record, name)
    if m is None or m.value is None or m.low is None or m.high is None:
        return None
    return _Interval(m.value, m.low, m.high, m.unit)


def _over(after: float, before: float) -> float:
    return after / before if before else math.inf
