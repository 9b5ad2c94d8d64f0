"""Describes the cases that a run left out, and the command that goes deeper. No torch."""

from __future__ import annotations

import fnmatch
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from accelcheck.core.case import LEVELS, Case
from accelcheck.core.imports import OPTION
from accelcheck.core.selection import Selection
from accelcheck.expectations import must_pass
from accelcheck.measure.gate import CHANGE, Gate, Use

if TYPE_CHECKING:
    from accelcheck.core.capability import Capability
    from accelcheck.core.journal import Record
    from accelcheck.devices.base import Status
    from accelcheck.techniques.matrix import Matrix

SHOWN = 3
"""Most lines about unused limits."""
WIDTH = 100
"""Most characters of a reason."""


class SelectedRun(Protocol):
    """The part of a run's configuration that reports show: the selection, and this machine's devices."""

    @property
    def selection(self) -> Selection: ...
    @property
    def statuses(self) -> Mapping[str, Status]: ...
    @property
    def failed_imports(self) -> Mapping[str, Capability]: ...


@dataclass(frozen=True)
class Scope:
    """The numbers of cases on one device, of all levels and up to each; the matrix is the same on each.

    Attributes:
        levels, techniques: Selected cases up to each level, and selected techniques.
        missing: Ids on the must-pass lists of the selected devices that the matrix lacks.
        elsewhere: Selected cases of all devices that are in other shards.
    """

    total: int
    levels: tuple[int, ...]
    techniques: int
    missing: tuple[str, ...] = ()
    elsewhere: int = 0

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values for a worker's output."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scope:
        """Read a worker's output."""
        return msgspec.convert(data, cls)

    @classmethod
    def of(cls, matrix: Matrix, selection: Selection) -> Scope:
        """Count the cases of a matrix."""
        everything = matrix.levels(Selection((), level=max(LEVELS)))
        selected = matrix.levels(replace(selection, level=max(LEVELS)))
        return cls(
            everything.total(),
            tuple(sum(selected[lower] for lower in LEVELS if lower <= level) for level in LEVELS),
            sum(
                not selection.techniques or any(fnmatch.fnmatchcase(name, glob) for glob in selection.techniques)
                for name in matrix.techniques
            ),
            _missing(matrix, selection),
            len(matrix.cases(replace(selection, shard=None))) - len(matrix.cases(selection)) if selection.shard else 0,
        )


def first_line(run: SelectedRun, cases: Sequence[Case]) -> str:
    """Describe the cases that are going to run."""
    techniques, workloads = {case.technique for case in cases}, {case.workload for case in cases}
    counts = Counter(case.device for case in cases)
    places = []
    for name in run.selection.devices:
        fingerprint = run.statuses[name].fingerprint
        chip = fingerprint.chip if fingerprint is not None else "absent: they are skipped"
        places.append(f"{counts[name]:,} cases on {name} ({chip})")
    part = f", shard {run.selection.shard}" if run.selection.shard is not None else ""
    counted = f"techniques: {len(techniques)}, workloads: {len(workloads)}"
    return f"level {run.selection.level}{part}: {', '.join(places)}; {counted}"


def lines(
    run: SelectedRun,
    gate: Gate,
    records: Iterable[Record],
    scope: Scope | None,
    arguments: Sequence[str],
    session: str,
    timed: int = 0,
) -> list[str]:
    """Make the last section of the summary: at most about 12 lines.

    `scope` is None where no process counted the cases. `arguments` are those of pytest, and `session` is the command of
    nox that the run is part of, if any. `timed` counts the test functions with timed cases that workers left out.
    """
    all_records = list(records)
    if session and all_records and all(record.case.alone for record in all_records):
        # This is the second half of a nox session; the summary of the first half stands above.
        rest = deeper(run.selection, session=session)
        timed_cases = f"level {run.selection.level} of {max(LEVELS)}: {len(all_records):,} timed cases"
        left_out = [
            f"{timed_cases}; the summary above has the others" + (f". Deeper: {rest}" if rest else ""),
            *_shards(run.selection, scope),
        ]
    else:
        present = {name for name in run.selection.devices if run.statuses[name].present}
        left_out = [
            *_levels(run.selection, scope, all_records, present, deeper(run.selection, arguments, session)),
            *_shards(run.selection, scope),
            *_timed(timed, session),
            *_devices(run),
            *_techniques(scope, [record for record in all_records if record.case.device in present]),
        ]
    left_out += [*_baselines(gate, all_records), *_limits(gate, all_records)]
    return ["not looked at:", *(f"  {line}" for line in left_out)]


def deeper(selection: Selection, arguments: Sequence[str] = (), session: str = "") -> str:
    """Command that runs the next level; empty at the last one."""
    if selection.level == max(LEVELS):
        return ""
    level = selection.level + 1
    if session:
        return f"ACCELCHECK_LEVEL={level} {session}"
    kept: list[str] = []
    given = iter(arguments)
    for word in given:
        if word == "--accel-level":
            next(given, None)
        elif not word.startswith("--accel-level="):
            kept.append(word)
    return shlex.join(["pytest", *kept, f"--accel-level={level}"])


def _levels(
    selection: Selection, scope: Scope | None, records: Sequence[Record], present: Collection[str], command: str
) -> list[str]:
    if scope is None:
        return [f"deeper levels: {command}"] if command else []
    counts = Counter(record.case.device for record in records)
    groups: dict[int, list[str]] = {}
    for name in selection.devices:
        if name in present:
            groups.setdefault(counts[name], []).append(name)
    lines = []
    for count, names in groups.items():
        line = f"{', '.join(names)}, level {selection.level} of {max(LEVELS)}: {count:,} of {scope.total:,} cases"
        if selection.cases:
            line += ", selected by --accel-case"
        elif command and (added := scope.levels[selection.level] - scope.levels[selection.level - 1]):
            where = " in all shards" if selection.shard is not None else ""
            line += f"; level {selection.level + 1} adds {added:,}{where}: {command}"
        lines.append(line)
    return lines


def _shards(selection: Selection, scope: Scope | None) -> list[str]:
    if selection.shard is None:
        return []
    number = f"{scope.elsewhere:,} more cases" if scope is not None else "the other cases"
    return [f"other shards: this is shard {selection.shard}; {number} of the selection are in the others"]


def _timed(count: int, session: str) -> list[str]:
    if not count:
        return []
    how = "the session times them next, if no case failed" if session else "run accelcheck.suite.test_speed without -n"
    if session.startswith("accelcheck run"):
        how = "the second part of this command times them"
    return [f"timed cases: not run, because workers would disturb them; {how}"]


def _devices(run: SelectedRun) -> list[str]:
    absent = [
        f"{name}: {_short(status.capability.reason)}" for name, status in run.statuses.items() if not status.present
    ]
    absent += [f"{OPTION}={name}: {_short(failure.reason)}" for name, failure in run.failed_imports.items()]
    other = [name for name, status in run.statuses.items() if status.present and name not in run.selection.devices]
    return [
        *([f"absent devices: {'; '.join(absent)}"] if absent else []),
        *([f"devices that are present and not selected: {', '.join(other)}"] if other else []),
    ]


def _techniques(scope: Scope | None, records: Sequence[Record]) -> list[str]:
    executed = {record.case.technique for record in records if record.verdict.executed}
    reasons: dict[str, str] = {}
    for record in records:
        if record.case.technique not in executed:
            reasons.setdefault(record.case.technique, record.code or str(record.verdict))
    counts = Counter(reasons.values())
    if scope is not None and (more := scope.techniques - len(executed) - len(reasons)) > 0:
        counts["no case in this run"] = more
    if not counts:
        return []
    total = f" of {scope.techniques}" if scope is not None else ""
    why = ", ".join(f"{number} {reason}" for reason, number in counts.most_common())
    return [f"techniques without an executed case: {counts.total()}{total}: {why}"]


def _baselines(gate: Gate, records: Sequence[Record]) -> list[str]:
    timed = [record for record in records if record.measurements and record.case.timed]
    without = sum(any(m.name == CHANGE and m.value is None for m in record.measurements) for record in timed)
    if timed and gate.use is Use.OFF:
        return [f"baselines: {len(timed):,} timed cases were not compared; --accel-baseline=check compares them"]
    if without and gate.use is Use.CHECK:
        return [f"baselines: {without:,} of {len(timed):,} timed cases have none that they can be compared with"]
    return []


def _limits(gate: Gate, records: Sequence[Record]) -> list[str]:
    unused = gate.idle(records)
    more = len(unused) - SHOWN
    return [*unused[:SHOWN], *([f"limit: {more} more that no case is compared with"] if more > 0 else [])]


def _missing(matrix: Matrix, selection: Selection) -> tuple[str, ...]:
    wanted = {name for device in selection.devices for name in must_pass.of(device).selected(selection, device)}
    if wanted:
        wanted.difference_update(case.id for case in matrix.cases(replace(selection, shard=None)))
    return tuple(sorted(wanted))


def _short(reason: str) -> str:
    line = reason.partition("\n")[0]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
