"""Joins the runs of each device, in one or several journals, into one. No torch.

Runs are of one device if its fingerprint, the versions of accelcheck and Python, and its must-pass list are the same.
"""

from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from accelcheck.core import shards
from accelcheck.core.bounded import Source
from accelcheck.core.case import LEVELS, Case, Measurement, Verdict
from accelcheck.core.journal import JournalError, Record
from accelcheck.core.journal_reading import Section, sections
from accelcheck.core.plain import text
from accelcheck.devices.base import Fingerprint, fingerprint_from_json
from accelcheck.report.message import reproduce

BAD_FIRST = (
    Verdict.DEVICE_LOST, Verdict.CRASH, Verdict.HANG, Verdict.ERROR, Verdict.FAIL, Verdict.FLAKY, Verdict.XPASS,
    Verdict.XFAIL, Verdict.WAIVED, Verdict.PASS, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE,
)  # fmt: skip
"""Verdicts, the worst one first."""
MOST_DEVICES = 64
"""Most devices of one run."""
_BADNESS = {verdict: rank for rank, verdict in enumerate(BAD_FIRST)}


class UsedLedger(msgspec.Struct, frozen=True):
    """A ledger that a run used: file name, and SHA-256 of the content."""

    name: str
    sha256: str


class UsedList(msgspec.Struct, frozen=True):
    """The must-pass list that was in force for a device."""

    kind: str = msgspec.field(name="class")
    version: int
    sha256: str


class OwnModel(msgspec.Struct, frozen=True):
    """A user-owned model: its spec on the command line, ``FILE:FUNCTION``, and a summary."""

    spec: str
    summary: str = ""


class _Device(msgspec.Struct):
    capability: str = ""
    fingerprint: dict[str, Any] | None = None


class Header(msgspec.Struct):
    """The fields of a run's header that reports read; an absent field has its default."""

    started: str = ""
    accelcheck: str = ""
    python: str = ""
    platform: str = ""
    level: int = 1
    selection: dict[str, Any] = {}
    devices: dict[str, _Device] = {}
    packages: dict[str, str] = {}
    ledgers: tuple[UsedLedger, ...] = ()
    must_pass: dict[str, UsedList] = {}
    imports: tuple[str, ...] = ()
    models: dict[str, OwnModel] = {}


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """The joined runs of one device.

    Attributes:
        fingerprint: Fingerprint of the device; None where it was absent.
        capability: ``ok``, or the reason for its absence.
        platforms: Operating systems of the machines, in the order of the journals.
        level: Highest level that was asked for.
        started: Start of the first run, in ISO 8601.
        selections: Each run's selection of the matrix, from its header; empty for all in journals of earlier versions.
        packages: Versions of the installed packages by name, where a journal has them.
        records: One record for each case, sorted by id.
        sources: Files of the journals.
        remarks: Remarks about the journals: cut off, missing shards, cases with two verdicts.
        cut_off: Files of the journals of which a run did not come to its end.
        imports: Modules that its processes imported.
        models: User-owned models, by the names of their workloads.
    """

    device: str
    fingerprint: Fingerprint | None
    capability: str
    accelcheck: str
    python: str
    platforms: tuple[str, ...]
    level: int
    started: str
    selections: tuple[Mapping[str, Any], ...]
    packages: Mapping[str, str]
    records: tuple[Record, ...]
    sources: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    models: Mapping[str, OwnModel] = field(default_factory=dict)

    def reproduction(self, case: Case) -> str:
        """Command that runs a case alone, with the modules and the model that it needs."""
        model = self.models.get(case.workload)
        more = [] if model is None else [f"--accel-model={model.spec}"]
        return reproduce(case, [*(f"--accel-import={name}" for name in self.imports), *more])

    @property
    def executed(self) -> int:
        """Number of cases in which the technique ran."""
        return sum(record.verdict.executed for record in self.records)

    @property
    def green(self) -> bool:
        """True if at least one case ran, and all are green."""
        return self.executed > 0 and all(record.verdict.green for record in self.records)

    def counts(self) -> dict[str, int]:
        """Count the cases by verdict, the worst verdict first."""
        return counts(self.records)


@dataclass
class _Gathered:
    first: tuple[str, Fingerprint | None, str, str, str]
    records: dict[str, Record] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    headers: list[Header] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)


def measurement(record: Record, name: str) -> Measurement | None:
    """Find a measurement by its name."""
    return next((known for known in record.measurements if known.name == name), None)


def counts(records: Iterable[Record]) -> dict[str, int]:
    """Count the cases by verdict, the worst verdict first."""
    tally = Counter(record.verdict for record in records)
    return {str(verdict): tally[verdict] for verdict in BAD_FIRST if tally[verdict]}


def load(paths: Sequence[Source]) -> tuple[DeviceRun, ...]:
    """Read journals, or their pieces of a package, merged ones too: the devices, in the order in which they appear.

    A `JournalError` where one cannot be read, or is none, names file, line and field.
    """
    gathered: dict[tuple[str, ...], _Gathered] = {}
    for path in paths:
        empty = True
        for section in sections(path):
            empty = False
            _gather(gathered, str(path), section)
        if empty:
            raise JournalError(f"{path}: expected a journal, got a file without a whole line")
    return tuple(map(_joined, gathered.values()))


def _joined(run: _Gathered) -> DeviceRun:
    headers = run.headers
    selections = tuple(header.selection for header in headers)
    return DeviceRun(
        *run.first,
        platforms=tuple(dict.fromkeys(header.platform for header in headers)),
        level=max(header.level for header in headers),
        started=min(header.started for header in headers),
        selections=selections,
        packages=dict(sorted(ChainMap(*(header.packages for header in reversed(headers))).items())),
        imports=tuple(dict.fromkeys(name for header in headers for name in header.imports)),
        models=dict(ChainMap(*(header.models for header in reversed(headers)))),
        records=tuple(run.records[name] for name in sorted(run.records)),
        sources=tuple(dict.fromkeys(run.sources)),
        cut_off=tuple(dict.fromkeys(run.cut_off)),
        remarks=tuple(dict.fromkeys([*run.remarks, *shards.absent(selections)])),
    )


def labelled(runs: Sequence[DeviceRun]) -> list[tuple[str, Record]]:
    """All records, each with the label of its device."""
    return [(label, record) for label, run in zip(labels(runs), runs, strict=True) for record in run.records]


def labels(runs: Sequence[DeviceRun]) -> list[str]:
    """Label each device: its name, with chip and torch version and then a number where several have the same."""
    names = [run.device for run in runs]
    for describe in (_chip, _torch):
        shared = Counter(names)
        names = [
            f"{name}, {more}" if shared[name] > 1 and (more := describe(run)) else name
            for name, run in zip(names, runs, strict=True)
        ]
    shared, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        seen[name] += 1
        if shared[name] > 1:
            names[index] = f"{name} ({seen[name]})"
    return names


def read_header(source: str, header: Mapping[str, Any]) -> tuple[Header, dict[str, Fingerprint | None]]:
    """Parse a header, and each device's fingerprint, None for an absent one; a `JournalError` names a wrong field."""
    try:
        fields = msgspec.convert(dict(header), Header)
        fingerprints = {
            name: None if device.fingerprint is None else fingerprint_from_json(device.fingerprint)
            for name, device in fields.devices.items()
        }
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise JournalError(f"{source}: header: {text(error, 300)}") from error
    if fields.level not in LEVELS:
        got = text(fields.level, 20)
        raise JournalError(f"{source}: header: field 'level' is {got}; expected one of {', '.join(map(str, LEVELS))}")
    if len(fingerprints) > MOST_DEVICES:  # each has its own copy of what the header says of all
        got = f"{len(fingerprints):,}"
        raise JournalError(f"{source}: header: expected at most {MOST_DEVICES} devices in field 'devices', got {got}")
    return fields, fingerprints


def identity(device: str, fingerprint: Fingerprint | None, header: Header) -> tuple[str, ...]:
    """Properties that two runs of one device have in common."""
    required = header.must_pass.get(device)
    chip = repr(asdict(fingerprint)) if fingerprint else ""
    return (device, chip, header.accelcheck, header.python, required.sha256 if required else "")


def _gather(gathered: dict[tuple[str, ...], _Gathered], source: str, section: Section) -> None:
    header, fingerprints = read_header(section.where or source, section.header)
    by_device: dict[str, list[Record]] = {name: [] for name in header.devices}
    for record in section.records:
        by_device.setdefault(record.case.device, []).append(record)
    for name, records in by_device.items():
        fingerprint = fingerprints.get(name)
        key = identity(name, fingerprint, header)
        if key not in gathered:
            capability = header.devices[name].capability if name in header.devices else "not in the journal's header"
            gathered[key] = _Gathered((name, fingerprint, capability, header.accelcheck, header.python))
        run = gathered[key]
        run.sources.append(source)
        run.headers.append(header)
        if section.end is None:
            run.cut_off.append(source)
            run.remarks.append(f"{source}: the run was cut off" + (", in the middle of a line" if section.cut else ""))
        for record in records:
            _add(run, source, record)


def _add(run: _Gathered, source: str, record: Record) -> None:
    name = record.case.id
    other = run.records.get(name)
    if other is not None and other.verdict is not record.verdict:
        run.remarks.append(
            f"{name}: {other.verdict} in {run.origins[name]}, {record.verdict} in {source}; "
            "the worse of those that ran counts"
        )
    if other is None or _BADNESS[record.verdict] < _BADNESS[other.verdict]:
        run.records[name], run.origins[name] = record, source


def _chip(run: DeviceRun) -> str:
    return run.fingerprint.chip if run.fingerprint is not None else "absent"


def _torch(run: DeviceRun) -> str:
    version = run.fingerprint.versions.get("torch", "") if run.fingerprint is not None else ""
    return f"torch {version}" if version else ""
