"""Journals for tests: of one device, with the records that a test needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Journal, Record
from accelcheck.devices.base import Fingerprint

STORED = Path(__file__).parent.parent / "baselines"
EPYC = Fingerprint("cpu", "AMD EPYC", 2, versions={"torch": "2.13.0"})


def record(technique: str, verdict: Verdict = Verdict.PASS, device: str = "cpu") -> Record:
    return Record(Case(technique, "mlp", device, "float32", Mode.FORWARD, 1), verdict)


def journal(path: Path, *records: Record, fingerprint: Fingerprint = EPYC, end: bool = True, **facts: Any) -> Path:
    device = {"capability": "ok", "fingerprint": fingerprint.as_json()}
    header = {"accelcheck": "0.1.0", "python": "3.11.7", "level": 1, "started": "2026-11-23T10:00:00+00:00"}
    written = Journal(path)
    written.header(header | {"devices": {fingerprint.device: device}} | facts)
    for row in records:
        written.case(row.as_json())
    if end:
        written.end({"exit": 0})
    else:
        written.close()
    return path
