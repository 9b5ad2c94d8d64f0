"""Makes a report in OCP's Test and Validation output format, version 2.0, one JSON object a line. No torch.

The specification: https://github.com/opencomputeproject/ocp-diag-core/tree/main/json_spec. A stream is a test run on
one device under test, with a hardware info for each device of the journals. A test step is a technique on a device:

- a measurement for each gating figure beyond its budget, its validator, and for each figure of time and memory;
- an error for each case that raised, died, hung or lost its device;
- a diagnosis for each case that ran: PASS, FAIL, or UNKNOWN for a failure that the ledger expects;
- a log for each case that did not run.

The package ``ocptv`` writes such streams while a test runs, each line with the present time; these lines have the time
at which their run began.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from accelcheck.core.case import Figure, Verdict
from accelcheck.core.journal import Record
from accelcheck.report.ctrf import begun
from accelcheck.report.run import DeviceRun, labels

MAJOR, MINOR = 2, 0
RAISED = frozenset({Verdict.ERROR, Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST})
"""Verdicts with an error beside their diagnosis."""


def document(runs: Sequence[DeviceRun]) -> str:
    """Make the report as JSON lines, the same for the same journals."""
    names = labels(runs)
    begin = min((begun(run.started) for run in runs), default=begun(""))
    lines: list[str] = []
    stamp = begin.isoformat()
    _put(lines, stamp, {"schemaVersion": {"major": MAJOR, "minor": MINOR}})
    _put(lines, stamp, {"testRunArtifact": {"testRunStart": _start(runs, names)}})
    number = 0
    for name, run in zip(names, runs, strict=True):
        stamp = begun(run.started).isoformat()
        for remark in run.remarks:
            _put(lines, stamp, {"testRunArtifact": {"log": {"severity": "WARNING", "message": f"{name}: {remark}"}}})
        steps: dict[str, list[Record]] = {}
        for record in run.records:
            steps.setdefault(record.case.technique, []).append(record)
        for technique, records in steps.items():
            for artifact in _step(f"{technique} on {name}", name, run, records):
                _put(lines, stamp, {"testStepArtifact": {"testStepId": str(number), **artifact}})
            number += 1
    _put(lines, begin.isoformat(), {"testRunArtifact": {"testRunEnd": _end(runs)}})
    return "".join(lines)


def _put(lines: list[str], stamp: str, artifact: dict[str, Any]) -> None:
    line = {"sequenceNumber": len(lines), "timestamp": stamp, **artifact}
    lines.append(json.dumps(line, sort_keys=True, allow_nan=False) + "\n")


def _start(runs: Sequence[DeviceRun], names: Sequence[str]) -> dict[str, Any]:
    hardware, software = [], []
    for name, run in zip(names, runs, strict=True):
        fingerprint = run.fingerprint
        hardware.append(
            {
                "hardwareInfoId": name,
                "name": fingerprint.chip if fingerprint is not None else f"{name} (absent)",
                **({"version": fingerprint.driver} if fingerprint is not None and fingerprint.driver else {}),
            }
        )
        versions = dict(fingerprint.versions) if fingerprint is not None else {}
        versions |= {"accelcheck": run.accelcheck, "python": run.python}
        if fingerprint is not None and fingerprint.runtime:
            versions["runtime"] = fingerprint.runtime
        software += [
            {
                "softwareInfoId": f"{name}: {package}",
                "name": package,
                "version": version,
                "softwareType": "SYSTEM" if package == "runtime" else "APPLICATION",
            }
            for package, version in sorted(versions.items())
        ]
    platforms = (platform for run in runs for platform in run.platforms)
    asked = ({"level": run.level, "selections": list(run.selections)} for run in runs)
    return {
        "name": "accelcheck",
        "version": ", ".join(sorted({run.accelcheck for run in runs})),
        "commandLine": "pytest --pyargs accelcheck.suite " + " ".join(f"--accel-device={run.device}" for run in runs),
        "parameters": dict(zip(names, asked, strict=True)),
        "dutInfo": {
            "dutInfoId": "machine",
            "platformInfos": [{"info": platform} for platform in dict.fromkeys(platforms)],
            "hardwareInfos": hardware,
            "softwareInfos": software,
        },
    }


def _end(runs: Sequence[DeviceRun]) -> dict[str, str]:
    """Status and result; the specification allows a result only where the run was complete and something ran."""
    if not any(run.executed for run in runs):
        return {"status": "SKIP", "result": "NOT_APPLICABLE"}
    if any("was cut off" in remark for run in runs for remark in run.remarks):
        return {"status": "ERROR", "result": "NOT_APPLICABLE"}
    green = all(record.verdict.green for run in runs for record in run.records)
    return {"status": "COMPLETE", "result": "PASS" if green else "FAIL"}


def _step(title: str, device: str, run: DeviceRun, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    yield {"testStepStart": {"name": title}}
    for record in records:
        yield from _case(device, run, record)
    executed = [record for record in records if record.verdict.executed]
    status = "SKIP" if not executed else "ERROR" if all(record.verdict in RAISED for record in executed) else "COMPLETE"
    yield {"testStepEnd": {"status": status}}


def _case(device: str, run: DeviceRun, record: Record) -> Iterator[dict[str, Any]]:
    case = record.case
    if not record.verdict.executed:
        yield {"log": {"severity": "INFO", "message": f"{case.id}: {record.why or record.verdict}"}}
        return
    beyond = [figure for figure in record.figures if figure.gates and not figure.within]
    yield from ({"measurement": _figure(device, record, figure)} for figure in beyond)
    for m in record.measurements:
        if m.value is not None:
            bounds = {name: _number(value) for name, value in (("low", m.low), ("high", m.high)) if value is not None}
            yield {
                "measurement": {
                    "name": f"{case.id}: {m.name}",
                    "value": _number(m.value),
                    "unit": m.unit,
                    "hardwareInfoId": device,
                    "validators": [],
                    "metadata": bounds,
                }
            }
    if record.verdict in RAISED:
        yield {
            "error": {
                "symptom": f"accelcheck-{record.verdict}",
                "message": f"{case.id}: {record.why}",
                "softwareInfoIds": [f"{device}: accelcheck"],
            }
        }
    kind = "PASS" if record.verdict is Verdict.PASS else "UNKNOWN" if record.verdict.green else "FAIL"
    message = case.id if kind == "PASS" else f"{case.id}: {record.why}\nreproduce: {run.reproduction(case)}"
    yield {
        "diagnosis": {
            "verdict": f"{case.technique}-{record.verdict}",
            "type": kind,
            "message": message,
            "hardwareInfoId": device,
        }
    }


def _figure(device: str, record: Record, figure: Figure) -> dict[str, Any]:
    return {
        "name": f"{record.case.id}: {figure.path}: {figure.view}",
        "value": _number(figure.measured),
        "hardwareInfoId": device,
        "validators": [{"name": "budget", "type": "LESS_THAN_OR_EQUAL", "value": _number(figure.allowed)}],
        "metadata": {"path": figure.path, "view": figure.view, "where": figure.where},
    }


def _number(value: float) -> float | str:
    """Write numbers that JSON lacks as their names."""
    return value if math.isfinite(value) else str(value)
