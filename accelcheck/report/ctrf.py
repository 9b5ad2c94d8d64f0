"""Makes a report in the Common Test Report Format (https://ctrf.io), version 0.0.0 of its specification. No torch."""

import datetime as dt
import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import accelcheck
from accelcheck.core.case import Verdict
from accelcheck.core.journal import Record
from accelcheck.core.plain import text
from accelcheck.report.run import DeviceRun, labels

VERSION = "0.0.0"
"""Version of the specification."""
MOST_TRACE = 10_000
"""Most characters of a traceback: its last ones."""
STATUSES: Mapping[Verdict, str] = {
    **dict.fromkeys(Verdict, "failed"),  # the format's `flaky` is a test that passed in the end: here it is not right
    Verdict.PASS: "passed",
    Verdict.UNSUPPORTED: "skipped",
    Verdict.UNAVAILABLE: "skipped",
    Verdict.XFAIL: "other",  # not right, and known
    Verdict.WAIVED: "other",
}
"""Status of each verdict; a test's `rawStatus` has the verdict."""


def document(runs: Sequence[DeviceRun]) -> str:
    """The report as JSON, the same for the same journals."""
    names = labels(runs)
    tests = [_test(name, run, record) for name, run in zip(names, runs, strict=True) for record in run.records]
    statuses = Counter(test["status"] for test in tests)
    starts = [begun(run.started) for run in runs]
    start = min(starts, default=_EPOCH)
    lasted = sum(test["duration"] for test in tests)
    began = int(start.timestamp() * 1000)
    body = {
        "reportFormat": "CTRF",
        "specVersion": VERSION,
        "timestamp": start.isoformat(),
        "generatedBy": f"accelcheck {accelcheck.__version__}",
        "results": {
            "tool": {"name": "accelcheck", "version": ", ".join(sorted({run.accelcheck for run in runs}))},
            "summary": {
                "tests": len(tests),
                **{status: statuses[status] for status in ("passed", "failed", "skipped", "pending", "other")},
                "suites": len({tuple(test["suite"]) for test in tests}),
                "start": began,
                "stop": began + lasted,
                "duration": lasted,
                "extra": {"stop": "start and the seconds of all cases: journals do not say when a run ended"},
            },
            "tests": tests,
            "environment": {
                "osPlatform": ", ".join(dict.fromkeys(name for run in runs for name in run.platforms)),
                "testEnvironment": ", ".join(names),
                "healthy": all(run.fingerprint is not None for run in runs),
                "extra": {"devices": {name: _device(run) for name, run in zip(names, runs, strict=True)}},
            },
        },
    }
    body["reportId"] = str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True)))
    return json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n"


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def begun(started: str) -> dt.datetime:
    """Parse the start of a run; 1970 where its journal has no date in ISO 8601."""
    try:
        moment = dt.datetime.fromisoformat(started)
        return moment.astimezone(dt.UTC) if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
    except (ValueError, OverflowError):
        return _EPOCH


def _test(name: str, run: DeviceRun, record: Record) -> dict[str, Any]:
    case = record.case
    test: dict[str, Any] = {
        "testId": case.id,
        "name": case.id,
        "status": STATUSES[record.verdict],
        "rawStatus": str(record.verdict),
        "duration": round(1000 * sum(value for value in record.seconds.values() if 0.0 <= value < _LONGEST)),
        "suite": [name, case.technique],
        "device": run.fingerprint.chip if run.fingerprint is not None else run.device,
        "parameters": {name: getattr(case, name) for name in ("technique", "workload", "device", "dtype", "mode")},
        "tags": [f"level {case.level}"],
        "extra": {
            "reproduce": run.reproduction(case),
            "compared": record.compared,
            "evidence": [
                {"claim": e.label, "observed": str(e.observed), "engaged": e.engaged} for e in record.evidence
            ],
        },
    }
    if record.code:
        test["extra"]["code"] = record.code
    if why := record.why:
        test["message"] = why
    if record.traceback:
        test["trace"] = record.traceback[-MOST_TRACE:]
    return test


_LONGEST = 1e9
"""Seconds that no case takes; a journal may hold infinity."""


def _device(run: DeviceRun) -> dict[str, Any]:
    if run.fingerprint is None:
        return {"absent": text(run.capability)}
    return {**run.fingerprint.as_json(), "python": run.python, "level": run.level}
