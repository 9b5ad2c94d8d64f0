"""Whether a device qualifies at a level: its journals against the must-pass list of its class. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelcheck.core.case import LEVELS, Verdict
from accelcheck.expectations import must_pass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelcheck.core.journal import Record
    from accelcheck.expectations.must_pass import Floor, MustPass
    from accelcheck.report.run import DeviceRun

SHOWN = 3
"""Cases that a reason names."""
NARROWS = ("techniques", "workloads", "dtypes", "cases")
"""What a selection names that does not ask for a whole level; the shards of one may make a whole."""


@dataclass(frozen=True, slots=True)
class Qualification:
    """What a device shows at one level.

    Attributes:
        device: Its name.
        level: The level.
        required: The must-pass list.
        asked: How many cases the list has up to this level.
        passed: How many of them passed.
        absent: Ids of those that no journal has.
        unexecuted: Ids of those that did not run, each with its reason.
        wrong: Ids of those that ran and did not pass, each with its verdict; also those whose own figures or evidence contradict a pass.
        red: Ids of cases outside of the list that stand against the device, each with its verdict.
        shown: Executed cases, techniques, and elements compared, of all cases.
        floor: The least that is asked of each.
        unproven: Why the journals do not show that a whole run was on this device; empty where they do.
    """

    device: str
    level: int
    required: MustPass
    asked: int
    passed: int
    absent: tuple[str, ...]
    unexecuted: Mapping[str, str]
    wrong: Mapping[str, str]
    red: Mapping[str, str]
    shown: Floor
    floor: Floor
    unproven: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the device qualifies."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it does not: a line each; empty if it does."""
        found = list(self.unproven)
        if self.absent:
            found.append(_named(len(self.absent), "must-pass cases are in no journal", self.absent))
        if self.unexecuted:
            found.append(
                _named(
                    len(self.unexecuted),
                    "must-pass cases did not run",
                    [f"{name} ({why})" for name, why in self.unexecuted.items()],
                )
            )
        for what, cases in (("must-pass cases did not pass", self.wrong), ("other cases are not right", self.red)):
            if cases:
                found.append(_named(len(cases), what, [f"{name} ({verdict})" for name, verdict in cases.items()]))
        found += [
            f"{what}: expected at least {least:,}, got {got:,}"
            for what, got, least in (
                ("executed cases", self.shown.cases, self.floor.cases),
                ("techniques with an executed case", self.shown.techniques, self.floor.techniques),
                ("elements compared with the oracle", self.shown.elements, self.floor.elements),
            )
            if got < least
        ]
        return tuple(found)

    def __str__(self) -> str:
        """One line: what the list is, how many passed, and whether the device qualifies."""
        version = f"must-pass list {self.required.kind} {self.required.version} ({self.required.digest[:12]})"
        answer = "qualifies" if self.holds else "does not qualify"
        return f"{self.device} {answer} at level {self.level}: {self.passed:,} of {self.asked:,} cases of the {version} passed"


def qualification(run: DeviceRun, level: int | None = None) -> Qualification:
    """Hold the journals of a device against its must-pass list.

    Args:
        run: What the journals say of it.
        level: The level; that of the run if None.
    """
    return replace(
        judged(run.device, run.level if level is None else level, run.records), unproven=tuple(_unproven(run))
    )


def whole(run: DeviceRun) -> Qualification | None:
    """As `qualification`, for a device of which the whole of a level was asked for; None for any other."""
    narrowed = any(any(one.get(name) for name in NARROWS) for one in run.selections)
    if narrowed or not any(record.verdict.executed and not record.case.alone for record in run.records):
        return None
    return qualification(run)


def highest(run: DeviceRun) -> int:
    """The highest level, up to that of the run, at which a device qualifies; 0 if there is none."""
    return max((level for level in LEVELS if level <= run.level and qualification(run, level).holds), default=0)


def judged(device: str, level: int, records: Sequence[Record]) -> Qualification:
    """Hold the records of a device against its must-pass list; those of other devices do not count."""
    required = must_pass.of(device)
    wanted = required.ids(device, level)
    found = {record.case.id: record for record in records if record.case.device == device}
    listed = {name: found[name] for name in sorted(wanted & found.keys())}
    executed = [record for record in found.values() if record.verdict.executed and not record.case.alone]
    return Qualification(
        device,
        level,
        required,
        len(wanted),
        sum(record.verdict is Verdict.PASS and not record.contradiction for record in listed.values()),
        tuple(sorted(wanted - found.keys())),
        {name: _why(record) for name, record in listed.items() if not record.verdict.executed},
        {
            name: _verdict(record)
            for name, record in listed.items()
            if record.verdict.executed and (record.verdict is not Verdict.PASS or record.contradiction)
        },
        {
            name: str(record.verdict)
            for name, record in sorted(found.items())
            if name not in wanted and not record.verdict.green
        },
        must_pass.Floor(
            len(executed),
            len({record.case.technique for record in executed}),
            sum(record.compared for record in executed),
        ),
        required.floors[level],
    )


def _unproven(run: DeviceRun) -> Iterator[str]:
    if run.fingerprint is None:
        yield f"the journals have no fingerprint of the device: {run.capability}"
    elif run.fingerprint.device != run.device:
        yield f"the fingerprint is that of another device: {run.fingerprint.device}"
    yield from (f"a run was cut off, and its other cases are unknown: {source}" for source in run.cut_off)


def _why(record: Record) -> str:
    return f"{record.verdict}: {record.code or record.headline}"


def _verdict(record: Record) -> str:
    # A ledger of the device's vendor may expect anything; what accelcheck's own expects is not on the list.
    if record.verdict is Verdict.XFAIL:
        return "xfail: a ledger expects it to fail"
    return f"{record.verdict}, but {record.contradiction}" if record.contradiction else str(record.verdict)


def _named(count: int, what: str, names: Sequence[str]) -> str:
    more = f", and {count - SHOWN:,} more" if count > SHOWN else ""
    return f"{count:,} {what}: {', '.join(names[:SHOWN])}{more}"
