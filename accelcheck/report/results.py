"""Writes files of results to keep and compare: small sorted JSON with schema, date, versions and device. No torch."""

import datetime as dt
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelcheck
from accelcheck.core.errors import InputError
from accelcheck.core.files import replacing
from accelcheck.core.plain import with_floats
from accelcheck.devices.base import Fingerprint

SCHEMA = 1
"""Version of the layout."""
DIGITS = 4
"""Significant digits of measurements: no clock has more, and a diff of two files stays readable."""


class ResultsError(InputError):
    """A file cannot be written; the message says which, why and what to do."""


def writable(*paths: Path | None) -> None:
    """Check that files can be written, before anything is measured; a `ResultsError` where one cannot."""
    for path in filter(None, paths):
        if path.is_dir():
            raise ResultsError(f"{path}: expected a file's name, got a folder")
        if not path.parent.is_dir():
            raise ResultsError(f"{path}: expected a folder that exists, there is no {path.parent}; make it first")


def write(path: Path, kind: str, device: Fingerprint, body: Mapping[str, Any]) -> None:
    """Write results of a kind by `save`, with schema, date, versions and device; floats are rounded."""
    plain = {
        "schema": SCHEMA,
        "kind": kind,
        "accelcheck": accelcheck.__version__,
        "made": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": device.as_json(),
        **with_floats(body, _rounded),
    }
    save(path, json.dumps(plain, indent=1, sort_keys=True, allow_nan=False) + "\n")


def save(path: Path, text: str) -> None:
    """Write a text in UTF-8, so that readers see the old file or the new one; a `ResultsError` where that fails."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from error


def identity(device: Fingerprint) -> str:
    """Describe a device in one line: chip, count, runtime and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(device.versions.items()))
    return f"{device.device}: {device.chip} x {device.count}, {device.runtime}, {versions}"


def _rounded(value: float) -> float | str:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
