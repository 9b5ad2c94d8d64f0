"""A report in OCP's Test and Validation output format, version 2.0, one JSON object a line. No torch.

The specification: https://github.com/opencomputeproject/ocp-diag-core/tree/main/json_spec. One stream is one test run on one device
under test, which has a hardware info for each device of the journals. A test step is a technique on a device. In a step:

- a measurement for each gating figure beyond its budget, which is its validator, and for each figure of time and memory;
- an error for each case that raised, died, hung or lost its device;
- a diagnosis for each case that ran: PASS, FAIL, or UNKNOWN for a failure that the ledger expects;
- a log for each case that did not run.

The package ``ocptv`` writes such streams while a test runs, each line with the present time; these lines are of a run that is over, and
have the time at which it began.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from accelcheck.core.case import Verdict
from accelcheck.report.ctrf import begun
from accelcheck.report.run import labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accelcheck.core.case import Figure
    from accelcheck.core.journal import Record
    from accelcheck.report.run import DeviceRun

MAJOR, MINOR = 2, 0
RAISED = frozenset({Verdict.ERROR, Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST})
"""Verdicts that have an error beside their diagnosis."""


def document(runs: Sequence[DeviceRun]) -> str:
    """The report as JSON lines, the same for the same journals."""
    names = labels(runs)
    begin = min((begun(run.started) for run in runs), default=begun(""))
    lines: list[str] = []
    _put(lines, begin.isoformat(), {"schemaVersion": {"major": MAJOR, "minor": MINOR}})
    _put(lines, begin.isoformat(), {"testRunArtifact": {"testRunStart": _start(runs, names)}})
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
    found = {"sequenceNumber": len(lines), "timestamp": stamp, **artifact}
    lines.append(json.dumps(found, sort_keys=True, allow_nan=False) + "\n")


def _start(runs: Sequence[DeviceRun], names: Sequence[str]) -> dict[str, Any]:
    hardware, software = [], []
    for name, run in zip(names, runs, strict=True):
        found = run.fingerprint
        hardware.append(
            {
                "hardwareInfoId": name,
                "name": found.chip if found is not None else f"{name} (absent)",
                **({"version": found.driver} if found is not None and found.driver else {}),
            }
        )
        versions = dict(found.versions) if found is not None else {}
        versions |= {"accelcheck": run.accelcheck, "python": run.python}
        if found is not None and found.runtime:
            versions["runtime"] = found.runtime
        software += [
            {
                "softwareInfoId": _software(name, package),
                "name": package,
                "version": version,
                "softwareType": "SYSTEM" if package == "runtime" else "APPLICATION",
            }
            for package, version in sorted(versions.items())
        ]
    return {
        "name": "accelcheck",
        "version": ", ".join(sorted({run.accelcheck for run in runs})),
        "commandLine": "pytest --pyargs accelcheck.suite " + " ".join(f"--accel-device={run.device}" for run in runs),
        "parameters": {
            name: {"level": run.level, "selections": list(run.selections)}
            for name, run in zip(names, runs, strict=True)
        },
        "dutInfo": {
            "dutInfoId": "machine",
            "platformInfos": [{"info": one} for one in dict.fromkeys(one for run in runs for one in run.platforms)],
            "hardwareInfos": hardware,
            "softwareInfos": software,
        },
    }


def _software(device: str, package: str) -> str:
    return f"{device}: {package}"


def _end(runs: Sequence[DeviceRun]) -> dict[str, str]:
    """The specification allows a result only where the run was complete and something ran."""
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
    beyond = [one for one in record.figures if one.gates and not one.within]
    yield from ({"measurement": _figure(device, record, one)} for one in beyond)
    for one in record.measurements:
        if one.value is not None:
            yield {
                "measurement": {
                    "name": f"{case.id}: {one.name}",
                    "value": _number(one.value),
                    "unit": one.unit,
                    "hardwareInfoId": device,
                    "validators": [],
                    "metadata": {
                        name: _number(value)
                        for name, value in (("low", one.low), ("high", one.high))
                        if value is not None
                    },
                }
            }
    if record.verdict in RAISED:
        yield {
            "error": {
                "symptom": f"accelcheck-{record.verdict}",
                "message": f"{case.id}: {record.why}",
                "softwareInfoIds": [_software(device, "accelcheck")],
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
    """A number, or the name of one that JSON does not have."""
    return value if math.isfinite(value) else str(value)
