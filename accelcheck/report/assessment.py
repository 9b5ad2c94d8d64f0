"""Assesses a device: the points of each item, evidenced by cases, claimed by a person, or missing. No torch.

A case that is not in the journal, did not run, is flaky, or fails as the ledger expects gives no point.
"""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelcheck.core.case import HOST_RATIO, Measurement, Verdict
from accelcheck.core.journal import Record
from accelcheck.measure.paired import MARGIN
from accelcheck.report.quality import STABLE, UNSTABLE, Answer, Item, ItemTable, Rule, answer_to
from accelcheck.report.run import DeviceRun, measurement

FLAKY = 0.05
"""Least share of flaky cases that is too large; 59 cases without a flaky one are the fewest that show less."""
CONFIDENCE = 0.95
"""Confidence of the bound that must be below `FLAKY`."""
SHOWN = 200
"""Most characters of a reason."""
HOW = "run pytest --pyargs accelcheck.suite --accel-technique=platform --accel-journal=FILE, without -n, on the device"
"""Command that puts the items into a journal."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The points of an item for cases (evidenced) and for a person's answer (claimed).

    The evidence is cases and figures, or the answer with its link; `lacking` is the reason for missing points, if any.
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
    """The points of a table: at most its own total, whatever its items add up to; evidence counts first."""

    table: ItemTable
    results: tuple[ItemResult, ...]

    @property
    def evidenced(self) -> int:
        return min(self.table.points, sum(result.evidenced for result in self.results))

    @property
    def claimed(self) -> int:
        return min(self.table.points - self.evidenced, sum(result.claimed for result in self.results))

    @property
    def missing(self) -> int:
        return self.table.points - self.evidenced - self.claimed


@dataclass(frozen=True, slots=True)
class Assessment:
    """The assessment of one device: its points over all tables, and its level."""

    run: DeviceRun
    tables: tuple[TableResult, ...]

    @property
    def evidenced(self) -> int:
        return sum(table.evidenced for table in self.tables)

    @property
    def claimed(self) -> int:
        return sum(table.claimed for table in self.tables)

    @property
    def most(self) -> int:
        """Points of all tables."""
        return sum(table.table.points for table in self.tables)

    @property
    def missing(self) -> int:
        return self.most - self.evidenced - self.claimed

    @property
    def unmet(self) -> tuple[str, ...]:
        """Items of priority P0 that lack points."""
        return tuple(r.item.name for table in self.tables for r in table.results if r.item.required and r.missing)

    @property
    def level(self) -> str:
        """Level by evidence and claims."""
        return level(self.evidenced + self.claimed, not self.unmet)

    @property
    def level_of_evidence(self) -> str:
        """Level by evidence alone."""
        claimed = any(r.claimed for table in self.tables for r in table.results if r.item.required)
        return level(self.evidenced, not self.unmet and not claimed)


LEVELS = ("Engineering", "Unstable", "Stable")
"""Levels, the lowest first."""


def level(points: int, required: bool) -> str:  # noqa: FBT001 - one of the two facts that a level depends on
    """Level of a number of points; `required` states that every item of priority P0 has all of its points."""
    if points >= STABLE and required:
        return "Stable"
    return "Unstable" if points >= UNSTABLE else "Engineering"


def assess(run: DeviceRun, tables: Sequence[ItemTable], answers: Sequence[Answer] = ()) -> Assessment:
    """Assess a device by its journals, and by answers."""
    # Cases of a device without a fingerprint are evidence of none.
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
    answered = f"answered by {answer.by} on {answer.date}"
    points = item.points
    if answer.fraction is not None:
        answered += f": {answer.fraction:.0%}"
        points = max((gives for least, gives in item.steps if answer.fraction >= least), default=0)
    against = [
        _said(record)
        for glob in item.contradicted
        for record in _matching(records, glob)
        if record.verdict.executed and record.verdict is not Verdict.PASS
    ]
    if not answer.yes:
        return ItemResult(item, 0, 0, (), f"{answered}: no", answer.link)
    if against:
        return ItemResult(item, 0, 0, (answered,), f"the journal says otherwise: {'; '.join(against)}", answer.link)
    part = points < item.points and answer.fraction is not None
    lacking = f"{answer.fraction:.0%} of what is asked for" if part else ""
    return ItemResult(item, 0, points, (answered,), lacking, answer.link)


def _all(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """Require that each case passes that exists on the device; for `Rule.FAST`, in no more time than the CPU."""
    evidence, against, left_out = [], [], []
    for glob in item.cases:
        matches = _matching(records, glob)
        if not matches:
            against.append(f"{glob} is not in the journal")
        for record in matches:
            if record.verdict is Verdict.UNSUPPORTED:
                left_out.append(_said(record))
            elif record.verdict is not Verdict.PASS or record.contradiction:
                against.append(_said(record))
            elif item.rule is Rule.FAST and (reason := _slow(record)):
                against.append(f"{record.case.id}: {reason}")
            else:
                evidence.append(_seen(record, run))
    if against or not evidence:
        return ItemResult(item, 0, 0, tuple(evidence), "; ".join([*against, *left_out]))
    return ItemResult(item, item.points, 0, (*evidence, *(f"left out: {skipped}" for skipped in left_out)))


def _each(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """Require that at least one case of each glob passes."""
    evidence, against = [], []
    for glob in item.cases:
        ran = [record for record in _matching(records, glob) if record.verdict.executed]
        right = [record for record in ran if record.verdict is Verdict.PASS and not record.contradiction]
        if right:
            first = right[0].case.id
            evidence.append(f"{glob}: {len(right):,} of {len(ran):,} executed cases pass, such as {first}{_on(run)}")
        else:
            against.append(f"{glob}: none of {len(ran):,} executed cases passes" if ran else f"{glob} was not run")
    return ItemResult(item, 0 if against else item.points, 0, tuple(evidence), "; ".join(against))


def _flaky(item: Item, records: Mapping[str, Record], run: DeviceRun) -> ItemResult:
    """Require that the upper bound of the share of flaky cases is below `FLAKY`."""
    executed = [record for record in records.values() if record.verdict.executed]
    flaky = [record.case.id for record in executed if record.verdict is Verdict.FLAKY]
    if not executed:
        return ItemResult(item, 0, 0, (), "no case was executed")
    bound = upper_bound(len(flaky), len(executed))
    share = (
        f"{len(flaky):,} of {len(executed):,} executed cases are flaky; with {CONFIDENCE:.0%} confidence at most "
        f"{bound:.2%}{_on(run)}"
    )
    if flaky:
        share += f": {', '.join(flaky[:3])}{', ...' if len(flaky) > 3 else ''}"
    if bound < FLAKY:
        return ItemResult(item, item.points, 0, (share,))
    return ItemResult(item, 0, 0, (), f"{share}; below {FLAKY:.0%} is needed")


_MEASURED = {Rule.ALL: _all, Rule.FAST: _all, Rule.EACH: _each, Rule.FLAKY: _flaky}


def upper_bound(count: int, of: int) -> float:
    """The upper bound of a share, exact (Clopper and Pearson, Biometrika 26, 1934), with `CONFIDENCE` on this side."""
    from scipy.special import betaincinv

    return 1.0 if count >= of else float(betaincinv(count + 1, of - count, CONFIDENCE))


def _slow(record: Record) -> str:
    """Reason why a case may be slower than the host's CPU; empty where it is not."""
    ratio = measurement(record, HOST_RATIO)
    if ratio is None:
        return "its time beside the host's CPU was not measured"
    if ratio.value is None or ratio.high is None:
        return f"its time beside the host's CPU was not measured: {ratio.reason}"
    if not (0 < ratio.value <= ratio.high < math.inf):
        return f"its time beside the host's CPU is no interval: {ratio.value:.3g} to {ratio.high:.3g}"
    if ratio.high <= 1 + MARGIN:
        return ""
    low = ratio.low if ratio.low is not None else ratio.value
    how = "slower than the host's CPU" if low > 1 + MARGIN else "perhaps slower than the host's CPU"
    return f"{how}: {_figure(ratio)}"


def _figure(ratio: Measurement) -> str:
    if ratio.value is None or ratio.low is None or ratio.high is None or ratio.low == ratio.high:
        return ratio.reason
    return f"{ratio.value:.3g} times its time ({ratio.low:.3g} to {ratio.high:.3g})"


def _seen(record: Record, run: DeviceRun) -> str:
    """Describe a case that passes, with its figures and the date of the run."""
    ratio = measurement(record, HOST_RATIO)
    time = f"; time beside the host's CPU: {_figure(ratio)}" if ratio is not None else ""
    return f"{record.case.id}: pass, {record.compared:,} elements compared{time}{_on(run)}"


def _on(run: DeviceRun) -> str:
    """Date of the run."""
    return f", {run.started[:10]}" if run.started else ""


def _said(record: Record) -> str:
    """Describe a case that gives no point, with the reason."""
    first = record.headline[:SHOWN]
    verdict = str(record.verdict)
    if record.verdict is Verdict.XFAIL:
        verdict = "xfail, a failure that the ledger expects"
    if record.contradiction:
        return f"{record.case.id}: pass, but {record.contradiction}"
    # The reason of a case that did not run begins with the verdict.
    reason = first.removeprefix(f"{record.verdict} ")
    return f"{record.case.id}: {verdict}" + (f": {reason}" if reason else "")


def tried(found: Assessment) -> bool:
    """True if the journal has a case of an item that is measured by name, whatever its verdict."""
    items = [result.item for table in found.tables for result in table.results]
    globs = [glob for item in items if item.rule in {Rule.ALL, Rule.FAST} for glob in item.cases]
    records = {record.case.id: record for record in found.run.records}
    return any(_matching(records, glob) for glob in globs)
