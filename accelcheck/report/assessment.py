"""The assessment of a device: the points of each item, evidenced by cases, claimed by a person, or missing. No torch.

A point is given for what was seen: a case that is not in the journal, did not run, is flaky, or fails as the ledger expects gives none.
"""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.core.case import HOST_RATIO, Verdict
from accelcheck.measure.paired import MARGIN
from accelcheck.report.quality import STABLE, UNSTABLE, Rule, answer_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accelcheck.core.case import Measurement
    from accelcheck.core.journal import Record
    from accelcheck.report.quality import Answer, Item, ItemTable
    from accelcheck.report.run import DeviceRun

FLAKY = 0.05
"""Share of flaky tests that is too large."""
CONFIDENCE = 0.95
"""Of the bound that must be below it: 59 cases without a flaky one are the fewest that show it."""
SHOWN = 200
"""Characters of a reason."""
HOW = "run pytest --pyargs accelcheck.suite --accel-technique=platform --accel-journal=FILE, without -n, on the device"
"""What puts the items into a journal."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What an item gives.

    Attributes:
        item: The item.
        evidenced: Points for what cases show.
        claimed: Points for what a person answered.
        evidence: The cases and figures, or the answer.
        lacking: Why points are missing; empty where none are.
        link: Of an answer; empty otherwise.
    """

    item: Item
    evidenced: int
    claimed: int
    evidence: tuple[str, ...]
    lacking: str = ""
    link: str = ""

    @property
    def missing(self) -> int:
        """Points that are neither evidenced nor claimed."""
        return self.item.points - self.evidenced - self.claimed


@dataclass(frozen=True, slots=True)
class TableResult:
    """What a table gives: no more than its own total, whatever its items add up to; evidence counts first."""

    table: ItemTable
    results: tuple[ItemResult, ...]

    @property
    def evidenced(self) -> int:
        """Points for what cases show."""
        return min(self.table.points, sum(result.evidenced for result in self.results))

    @property
    def claimed(self) -> int:
        """Points for what a person answered."""
        return min(self.table.points - self.evidenced, sum(result.claimed for result in self.results))

    @property
    def missing(self) -> int:
        """The rest."""
        return self.table.points - self.evidenced - self.claimed


@dataclass(frozen=True, slots=True)
class Assessment:
    """The assessment of one device.

    Attributes:
        run: What the journals say.
        tables: By table, in order.
    """

    run: DeviceRun
    tables: tuple[TableResult, ...]

    @property
    def evidenced(self) -> int:
        """Points for what cases show."""
        return sum(table.evidenced for table in self.tables)

    @property
    def claimed(self) -> int:
        """Points for what a person answered."""
        return sum(table.claimed for table in self.tables)

    @property
    def most(self) -> int:
        """Points of all tables."""
        return sum(table.table.points for table in self.tables)

    @property
    def missing(self) -> int:
        """The rest."""
        return self.most - self.evidenced - self.claimed

    @property
    def unmet(self) -> tuple[str, ...]:
        """Items of priority P0 that lack points."""
        return tuple(r.item.name for table in self.tables for r in table.results if r.item.required and r.missing)

    @property
    def level(self) -> str:
        """The level that evidence and claims reach."""
        return level(self.evidenced + self.claimed, not self.unmet)

    @property
    def level_of_evidence(self) -> str:
        """The level that evidence alone reaches."""
        claimed = any(r.claimed for table in self.tables for r in table.results if r.item.required)
        return level(self.evidenced, not self.unmet and not claimed)


LEVELS = ("Engineering", "Unstable", "Stable")
"""The lowest first."""


def level(points: int, required: bool) -> str:  # noqa: FBT001 - of the two facts that a level depends on
    """The level of so many points; `required`: whether every item of priority P0 has all of its own."""
    if points >= STABLE and required:
        return "Stable"
    return "Unstable" if points >= UNSTABLE else "Engineering"


def assess(run: DeviceRun, tables: Sequence[ItemTable], answers: Sequence[Answer] = ()) -> Assessment:
    """Assess a device by what its journals say, and by answers."""
    # What ran on a device of which the journal has no fingerprint shows nothing of any.
    records = {record.case.id: record for record in run.records if run.fingerprint is not None}

    def result(item: Item) -> ItemResult:
        if item.rule is None:
            return _answered(item, records, answer_to(item, run.device, answers))
        return _MEASURED[item.rule](item, records, run)

    return Assessment(run, tuple(TableResult(table, tuple(result(item) for item in table.items)) for table in tables))


def _matching(records: Mapping[str, Record], glob: str) -> list[Record]:
    match = re.compile(fnmatch.translate(glob)).match
    return [record for name, record in records.items() if match(name)]


def _answered(item: Item, records: Mapping[str, Record], answer: Answer | None) -> ItemResult:
    if answer is None:
        return ItemResult(item, 0, 0, (), "no answer")
    said = f"answered by {answer.by} on {answer.date}"
    points = item.points
    if answer.fraction is not None:
        said += f": {answer.fraction:.0%}"
        points = max((gives for least, gives in item.steps if answer.fraction >= least), default=0)
    against = [
        _said(record)
        for glob in item.contradicted
        for record in _matching(records, glob)
        if record.verdict.executed and record.verdict is not Verdict.PASS
    ]
    if not answer.yes:
        return ItemResult(item, 0, 0, (), f"{said}: no", answer.link)
    if against:
        return ItemResult(item, 0, 0, (said,), f"the journal says otherwise: {'; '.join(against)}", answer.link)
    lacking = (
        f"{answer.fraction:.0%} of what is asked for" if points < item.points and answer.fraction is not None else ""
    )
    return ItemResult(item, 0, points, (said,), lacking, answer.link)


def _all(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """Every case passes; of several, those that do not exist on the device are left out."""
    return _together(item, records, run, lambda _: "")


def _fast(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """The same, and none is slower than the host's CPU."""
    return _together(item, records, run, _slow)


def _together(item: Item, records: Mapping[str, Record], run: DeviceRun, wrong: Callable[[Record], str]) -> ItemResult:
    evidence, against, left_out = [], [], []
    for glob in item.cases:
        found = _matching(records, glob)
        if not found:
            against.append(f"{glob} is not in the journal")
        for record in found:
            if record.verdict is Verdict.UNSUPPORTED:
                left_out.append(_said(record))
            elif record.verdict is not Verdict.PASS or record.contradiction:
                against.append(_said(record))
            elif reason := wrong(record):
                against.append(f"{record.case.id}: {reason}")
            else:
                evidence.append(_seen(record, run))
    if against or not evidence:
        return ItemResult(item, 0, 0, tuple(evidence), "; ".join([*against, *left_out]))
    return ItemResult(item, item.points, 0, (*evidence, *(f"left out: {said}" for said in left_out)))


def _each(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """Of the cases of each glob, one at least passes."""
    evidence, against = [], []
    for glob in item.cases:
        found = [record for record in _matching(records, glob) if record.verdict.executed]
        right = [record for record in found if record.verdict is Verdict.PASS and not record.contradiction]
        if right:
            first = right[0].case.id
            evidence.append(f"{glob}: {len(right):,} of {len(found):,} executed cases pass, such as {first}{_on(run)}")
        else:
            against.append(f"{glob}: none of {len(found):,} executed cases passes" if found else f"{glob} was not run")
    return ItemResult(item, 0 if against else item.points, 0, tuple(evidence), "; ".join(against))


def _flaky(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """The upper bound of the share of flaky cases among those that were executed is below `FLAKY`."""
    executed = [record for record in records.values() if record.verdict.executed]
    flaky = [record.case.id for record in executed if record.verdict is Verdict.FLAKY]
    if not executed:
        return ItemResult(item, 0, 0, (), "no case was executed")
    bound = upper_bound(len(flaky), len(executed))
    said = (
        f"{len(flaky):,} of {len(executed):,} executed cases are flaky; with {CONFIDENCE:.0%} confidence at most "
        f"{bound:.2%}{_on(run)}"
    )
    if flaky:
        said += f": {', '.join(flaky[:3])}{', ...' if len(flaky) > 3 else ''}"
    if bound < FLAKY:
        return ItemResult(item, item.points, 0, (said,))
    return ItemResult(item, 0, 0, (), f"{said}; below {FLAKY:.0%} is needed")


_MEASURED = {Rule.ALL: _all, Rule.FAST: _fast, Rule.EACH: _each, Rule.FLAKY: _flaky}


def upper_bound(count: int, of: int) -> float:
    """The upper bound of a share, exact (Clopper and Pearson, Biometrika 26, 1934), with `CONFIDENCE` on this side."""
    from scipy.special import betaincinv

    return 1.0 if count >= of else float(betaincinv(count + 1, of - count, CONFIDENCE))


def _slow(record: Record) -> str:
    """Why a case does not show that the device is no slower than the host's CPU; empty where it does."""
    found = _ratio(record)
    if found is None:
        return "its time beside the host's CPU was not measured"
    if found.value is None or found.high is None:
        return f"its time beside the host's CPU was not measured: {found.reason}"
    if not (0 < found.value <= found.high < math.inf):
        return f"its time beside the host's CPU is no interval: {found.value:.3g} to {found.high:.3g}"
    if found.high <= 1 + MARGIN:
        return ""
    low = found.low if found.low is not None else found.value
    how = "slower than the host's CPU" if low > 1 + MARGIN else "perhaps slower than the host's CPU"
    return f"{how}: {_figure(found)}"


def _ratio(record: Record) -> Measurement | None:
    return next((one for one in record.measurements if one.name == HOST_RATIO), None)


def _figure(found: Measurement) -> str:
    if found.value is None or found.low is None or found.high is None or found.low == found.high:
        return found.reason
    return f"{found.value:.3g} times its time ({found.low:.3g} to {found.high:.3g})"


def _seen(record: Record, run: DeviceRun) -> str:
    """A case that passes, with its figures and the date of the run."""
    found = _ratio(record)
    time = f"; time beside the host's CPU: {_figure(found)}" if found is not None else ""
    return f"{record.case.id}: pass, {record.compared:,} elements compared{time}{_on(run)}"


def _on(run: DeviceRun) -> str:
    """The date of the run."""
    return f", {run.started[:10]}" if run.started else ""


def _said(record: Record) -> str:
    """A case that gives no point, with the reason."""
    first = record.headline[:SHOWN]
    verdict = str(record.verdict)
    if record.verdict is Verdict.XFAIL:
        verdict = "xfail, a failure that the ledger expects"
    if record.contradiction:
        return f"{record.case.id}: pass, but {record.contradiction}"
    # The reason of what did not run begins with the verdict.
    reason = first.removeprefix(f"{record.verdict} ")
    return f"{record.case.id}: {verdict}" + (f": {reason}" if reason else "")


def tried(found: Assessment) -> bool:
    """Whether a case of an item that is measured by name is in the journal, whatever its verdict."""
    globs = [
        glob
        for table in found.tables
        for result in table.results
        if result.item.rule in {Rule.ALL, Rule.FAST}
        for glob in result.item.cases
    ]
    records = {record.case.id: record for record in found.run.records}
    return any(_matching(records, glob) for glob in globs)
