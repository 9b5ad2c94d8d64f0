"""Writes the terminal's header and summary: devices, matrix of techniques, counts, timed and slowest cases. No torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import accelcheck
from accelcheck.core.case import UNSEEN, Verdict
from accelcheck.core.imports import OPTION
from accelcheck.core.journal import Record
from accelcheck.core.units import duration, size
from accelcheck.devices.base import Fingerprint
from accelcheck.expectations.ceilings import PREFIX
from accelcheck.expectations.chips import RUNS, TRIED
from accelcheck.report import qualification
from accelcheck.report.console import aligned, escaped
from accelcheck.report.coverage import SelectedRun
from accelcheck.report.run import counts, measurement

SLOWEST = 5
TIMED = (
    "technique", "workload", "mode", "dtype", "median", "speed-up", "interval", "is", "same prec.", "peak",
    "of eager's", "first call", "cached", "launches", "baseline",
)  # fmt: skip
"""Columns of the table of timed cases."""
SHOWN = 3
"""Most cases named in a note; of more, it gives the number."""


def header(run: SelectedRun) -> list[str]:
    """Describe the selection, each device, and each module that cannot be imported, in a line each."""
    part = f", shard {run.selection.shard}" if run.selection.shard is not None else ""
    asked = ", ".join(run.selection.devices) or "none"
    lines = [f"accelcheck: level {run.selection.level}{part}, devices asked for: {asked}"]
    for name, status in run.statuses.items():
        fingerprint = status.fingerprint
        lines.append(f"  {name}: {_identity(fingerprint) if fingerprint is not None else status.capability}")
        lines += [f"    {told}"] if (told := status.told()) else []
    lines += [f"  {OPTION}={name}: {capability}" for name, capability in run.failed_imports.items()]
    return [escaped(line) for line in lines]


def summary(
    reporter: pytest.TerminalReporter,
    run: SelectedRun,
    records: Mapping[str, Record],
    journal: Path | None,
    remainder: Sequence[str],
    explained: Sequence[str] = (),
) -> None:
    """Write the whole summary, with lines about the cases left out (`remainder`) and about explained causes."""
    judged = list(records.values())
    unseen = ((r.case.device, f"{r.case.technique}: {r.remark}") for r in judged if r.remark.startswith(UNSEEN))
    _sections(
        reporter,
        matrix(judged, run.selection.devices),
        timed_lines(judged),
        _counted("not run:", ((r.case.device, r.reason) for r in judged if not r.verdict.executed)),
        _remarked("unsupported found by trying", (r for r in judged if r.remark == TRIED)),
        _counted("evidence that could not be had:", unseen),
        _remarked("runs although stated as unsupported", (r for r in judged if r.remark.startswith(RUNS))),
        _expected(judged),
        _above(judged),
        _slowest([record for record in judged if record.verdict.executed]),
        _listed(explained),
    )
    reporter.write_line(_totals(judged))
    for line in _qualified(judged, run):
        reporter.write_line(line)
    if journal is not None:
        reporter.write_line(escaped(f"journal: {journal}"))
    reporter.write_line("")
    for line in remainder:
        reporter.write_line(escaped(line))


def brief(
    reporter: pytest.TerminalReporter,
    records: Sequence[Record],
    journal: Path | None = None,
    explained: Sequence[str] = (),
) -> None:
    """Write the matrix, times and totals of the cases of models' tests, and lines about explained causes."""
    devices = tuple(dict.fromkeys(record.case.device for record in records))
    _sections(reporter, matrix(list(records), devices), timed_lines(records), _listed(explained), [_totals(records)])
    if journal is not None:
        reporter.write_line(escaped(f"journal: {journal}"))


def _sections(reporter: pytest.TerminalReporter, *sections: Sequence[str]) -> None:
    reporter.section("accelcheck")
    for lines in sections:
        for line in lines:
            reporter.write_line(escaped(line))
        if lines:
            reporter.write_line("")


def _listed(explained: Sequence[str]) -> list[str]:
    return ["explained:", *(f"  {line}" for line in explained)] if explained else []


def _totals(records: Sequence[Record]) -> str:
    executed = sum(record.verdict.executed for record in records)
    totals = ", ".join(f"{number} {verdict}" for verdict, number in counts(records).items()) or "no cases"
    compared = sum(record.compared for record in records)
    return f"{executed} cases executed, {compared} elements compared with the oracle: {totals}"


def _qualified(records: list[Record], run: SelectedRun) -> list[str]:
    """Say which devices qualify, where the whole of a level was asked for; timed cases alone do not count."""
    selection = run.selection
    if selection.techniques or selection.workloads or selection.dtypes or selection.cases or selection.shard:
        return []
    judged = {record.case.device for record in records if record.verdict.executed and not record.case.alone}
    lines = []
    for device in selection.devices:
        if device in judged:
            verdict = qualification.judged(device, selection.level, records)
            lines += [str(verdict), *(f"  {reason}" for reason in verdict.reasons)]
    return lines


def _expected(found: Sequence[Record]) -> list[str]:
    """Count the cases that a ledger expects to fail, by reason, and name the page that the reasons refer to."""
    reasons = [(r.case.device, r.headline) for r in found if r.verdict is Verdict.XFAIL]
    lines = _counted("expected to fail (ledger):", reasons)
    if any(FINDINGS in reason for _, reason in reasons) and (path := place(FINDINGS)) is not None:
        lines.append(f"  {FINDINGS}: {path}")
    return lines


def _counted(title: str, reasons: Iterable[tuple[str, str]]) -> list[str]:
    tally = Counter(reasons)
    lines = [f"  {device}: {number} x {reason}" for (device, reason), number in sorted(tally.items())]
    return [title, *lines] if lines else []


def _above(records: Iterable[Record]) -> list[str]:
    lines = [
        f"  {record.case.id}: {f.path}: {f.view} is {f.measured:.3g}, stored ceiling {f.allowed:.3g}"
        for record in records
        for f in record.figures
        if f.view.startswith(PREFIX)
    ]
    return ["larger budgets than were ever stored (a fault may hide in them):", *sorted(lines)] if lines else []


def _remarked(what: str, records: Iterable[Record]) -> list[str]:
    """Count the cases that no statement about the chip foresaw, in all and by reason."""
    matches = list(records)
    title = f"{what}: {len(matches)} case{'s' * (len(matches) != 1)} (docs/verdicts.md#what-a-chip-supports):"
    reasons = ((r.case.device, r.reason if r.remark == TRIED else f"{r.case.technique}: {r.remark}") for r in matches)
    return _counted(title, reasons)


def _slowest(executed: list[Record]) -> list[str]:
    lines = []
    for record in sorted(executed, key=lambda record: -sum(record.seconds.values()))[:SLOWEST]:
        phases = ", ".join(f"{phase} {value:.1f}" for phase, value in record.seconds.items() if value >= 0.05)
        lines.append(f"  {sum(record.seconds.values()):6.1f} s  {record.case.id}  ({phases})")
    return ["slowest cases:", *lines] if lines else []


def matrix(records: list[Record], devices: tuple[str, ...]) -> list[str]:
    """Make a row for each technique, a column for each device, and in each cell the counts per verdict."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.case.technique, record.case.device), []).append(record)
    techniques = sorted({technique for technique, _ in cells})
    rows = [
        (technique, *(_cell(cells[technique, d]) if (technique, d) in cells else "-" for d in devices))
        for technique in techniques
    ]
    return aligned([("technique", *devices), *rows])


def _cell(records: list[Record]) -> str:
    codes = {"" if record.verdict.executed else record.code for record in records}
    if len(codes) == 1 and (code := codes.pop()):
        return f"{records[0].verdict} [{code}]"
    return ", ".join(f"{number} {verdict}" for verdict, number in counts(records).items())


def timed_lines(records: Iterable[Record]) -> list[str]:
    """Format the table and notes on baselines; empty if no case was timed."""
    timed = [record for record in records if record.measurements and record.case.timed]
    if not timed:
        return []
    rows = [_row(record) for record in timed]
    devices = {record.case.device for record in timed}
    title = (
        "speed beside FP32 eager in the same process, peak memory, seconds of the first call (caches cold, then warm):"
    )
    table = [title if len(devices) == 1 else f"{', '.join(sorted(devices))}: {title}", *aligned([TIMED, *rows])]
    fewer = [(f"  {record.case.id}", why) for record in timed if (why := _fewer(record))]
    if fewer:
        table += ["", "launches fewer than eager:", *aligned(fewer)]
    held = [record for record in timed if measurement(record, "baseline-detectable") is not None]
    if held:
        table.append(
            f"compared with baselines: {len(held)} of {len(timed)} cases; in brackets the factor from which on it is "
            "a regression, and the smallest slowdown that such a check finds in 95 of 100 runs"
        )
    notes: dict[str, list[str]] = {}
    for record in timed:
        change = measurement(record, "baseline-change")
        if change is not None and change.value is None:
            notes.setdefault(change.reason, []).append(record.case.id)
    for note, cases in sorted(notes.items()):
        table.append(f"baseline: {note} ({', '.join(cases) if len(cases) <= SHOWN else f'{len(cases)} cases'})")
    return table


def _row(record: Record) -> tuple[str, ...]:
    by_name = {known.name: known for known in record.measurements}
    values = {known.name: known.value for known in record.measurements}
    case, speed_up, change = record.case, by_name.get("speed-up"), by_name.get("baseline-change")
    peak, eager_peak = values.get("peak-memory"), values.get("peak-memory-fp32-eager")
    launches, eager_launches = values.get("launches"), values.get("launches-fp32-eager")
    detectable = values.get("baseline-detectable")
    return (
        case.technique,
        case.workload,
        str(case.mode),
        case.dtype,
        _shown(values.get("latency"), duration, "-"),
        _shown(values.get("speed-up"), "{:.2f}x".format),
        "" if speed_up is None or speed_up.low is None else f"{speed_up.low:.3f}..{speed_up.high:.3f}",
        "" if speed_up is None else speed_up.reason.partition(",")[0],
        _shown(values.get("speed-up-same-precision"), "{:.2f}x".format),
        _shown(peak, lambda count: size(int(count)), "-"),
        "" if peak is None or not eager_peak else f"{100 * peak / eager_peak:.0f} %",
        _shown(values.get("first-call-cold"), duration, "-"),
        _shown(values.get("first-call-warm"), duration, "-"),
        "" if launches is None or eager_launches is None else f"{launches:.0f} of {eager_launches:.0f}",
        "" if change is None or detectable is None else f"{change.value:.3f} ({change.high:.3f}, {detectable:.3f})",
    )


def _shown(value: float | None, form: Callable[[float], str], absent: str = "") -> str:
    return absent if value is None else form(value)


def _fewer(record: Record) -> str:
    """Compare the launches of a case with those of eager, if there are fewer; else empty."""
    own, eager = (measurement(record, name) for name in ("launches", "launches-fp32-eager"))
    if own is None or own.value is None or eager is None or eager.value is None or own.value >= eager.value:
        return ""
    return own.reason


def _identity(fingerprint: Fingerprint) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(fingerprint.versions.items()))
    facts = [f"{fingerprint.count} x {fingerprint.chip}", fingerprint.runtime, fingerprint.driver, versions]
    facts += [f"{name}={value}" for name, value in sorted(fingerprint.environment.items())]
    return "; ".join(fact for fact in facts if fact)


FINDINGS = "docs/findings.md"
"""Page of accelcheck's findings, each with a reproduction, which ledgers refer to."""


def place(page: str) -> Path | None:
    """Find the file of a page such as `FINDINGS` in the installed package or in a checkout."""
    package = Path(accelcheck.__file__).parent
    return next((path for path in (package / page, package.parent / page) if path.is_file()), None)
