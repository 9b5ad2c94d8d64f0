"""Judges whether a device qualifies at a level: its journals against the must-pass list of its class. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from accelcheck.core.case import LEVELS, Verdict
from accelcheck.core.journal import Record
from accelcheck.expectations import must_pass
from accelcheck.report.run import DeviceRun

SHOWN = 3
"""Most cases named in a reason."""
NARROWS = ("techniques", "workloads", "dtypes", "cases")
"""Fields of a selection that restrict a level; shards together may make a whole level."""


@dataclass(frozen=True, slots=True)
class Qualification:
    """The result of a device at one level.

    Attributes:
        required: The must-pass list.
        asked, passed: Number of the list's cases up to this level, and of those that passed.
        absent: Ids of those that no journal has.
        unexecuted: Ids of those that did not run, each with its reason.
        wrong: Ids of those that ran and did not pass, or whose figures or evidence contradict a pass, with verdicts.
        red: Ids of cases outside of the list that are not green, each with its verdict.
        shown, floor: Numbers of executed cases, techniques, and elements compared; least numbers of these.
        unproven: Reasons why the journals may not be of a whole run on this device.
    """

    device: str
    level: int
    required: must_pass.MustPass
    asked: int
    passed: int
    absent: tuple[str, ...]
    unexecuted: Mapping[str, str]
    wrong: Mapping[str, str]
    red: Mapping[str, str]
    shown: must_pass.Floor
    floor: must_pass.Floor
    unproven: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if the device qualifies."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons why it does not, a line each; empty if it does."""
        lines = list(self.unproven)
        if self.absent:
            lines.append(_named(len(self.absent), "must-pass cases are in no journal", self.absent))
        for what, cases in (
            ("must-pass cases did not run", self.unexecuted),
            ("must-pass cases did not pass", self.wrong),
            ("other cases are not right", self.red),
        ):
            if cases:
                lines.append(_named(len(cases), what, [f"{name} ({why})" for name, why in cases.items()]))
        lines += [
            f"{what}: expected at least {least:,}, got {got:,}"
            for what, got, least in (
                ("executed cases", self.shown.cases, self.floor.cases),
                ("techniques with an executed case", self.shown.techniques, self.floor.techniques),
                ("elements compared with the oracle", self.shown.elements, self.floor.elements),
            )
            if got < least
        ]
        return tuple(lines)

    def __str__(self) -> str:
        """Name the list, the number of passed cases, and whether the device qualifies, in a line."""
        version = f"must-pass list {self.required.kind} {self.required.version} ({self.required.digest[:12]})"
        answer = "qualifies" if self.holds else "does not qualify"
        passed = f"{self.passed:,} of {self.asked:,} cases of the {version} passed"
        return f"{self.device} {answer} at level {self.level}: {passed}"


def qualification(run: DeviceRun, level: int | None = None) -> Qualification:
    """Compare the journals of a device with its must-pass list, at the level of the run if `level` is None."""
    verdict = judged(run.device, run.level if level is None else level, run.records)
    return replace(verdict, unproven=tuple(_unproven(run)))


def whole(run: DeviceRun) -> Qualification | None:
    """Qualify a device of which the whole of a level was asked for; None for any other."""
    narrowed = any(any(selection.get(name) for name in NARROWS) for selection in run.selections)
    if narrowed or not any(record.verdict.executed and not record.case.alone for record in run.records):
        return None
    return qualification(run)


def highest(run: DeviceRun) -> int:
    """Highest level, up to that of the run, at which a device qualifies; 0 if there is none."""
    return max((level for level in LEVELS if level <= run.level and qualification(run, level).holds), default=0)


def judged(device: str, level: int, records: Sequence[Record]) -> Qualification:
    """Compare the records of a device with its must-pass list; those of other devices do not count."""
    required = must_pass.of(device)
    wanted = required.ids(device, level)
    by_id = {record.case.id: record for record in records if record.case.device == device}
    listed = {name: by_id[name] for name in sorted(wanted & by_id.keys())}
    executed = [record for record in by_id.values() if record.verdict.executed and not record.case.alone]
    floor = must_pass.Floor(
        len(executed), len({record.case.technique for record in executed}), sum(record.compared for record in executed)
    )
    return Qualification(
        device,
        level,
        required,
        len(wanted),
        sum(record.verdict is Verdict.PASS and not record.contradiction for record in listed.values()),
        tuple(sorted(wanted - by_id.keys())),
        {name: f"{r.verdict}: {r.code or r.headline}" for name, r in listed.items() if not r.verdict.executed},
        {
            name: _verdict(r)
            for name, r in listed.items()
            if r.verdict.executed and (r.verdict is not Verdict.PASS or r.contradiction)
        },
        {name: str(r.verdict) for name, r in sorted(by_id.items()) if name not in wanted and not r.verdict.green},
        floor,
        required.floors[level],
    )


def _unproven(run: DeviceRun) -> Iterator[str]:
    if run.fingerprint is None:
        yield f"the journals have no fingerprint of the device: {run.capability}"
    elif run.fingerprint.device != run.device:
        yield f"the fingerprint is that of another device: {run.fingerprint.device}"
    yield from (f"a run was cut off, and its other cases are unknown: {source}" for source in run.cut_off)


def _verdict(record: Record) -> str:
    # A vendor's ledger may expect anything; failures that accelcheck's own expects are not on the list.
    if record.verdict is Verdict.XFAIL:
        return "xfail: a ledger expects it to fail"
    return f"{record.verdict}, but {record.contradiction}" if record.contradiction else str(record.verdict)


def _named(count: int, what: str, names: Sequence[str]) -> str:
    more = f", and {count - SHOWN:,} more" if count > SHOWN else ""
    return f"{count:,} {what}: {', '.join(names[:SHOWN])}{more}"
