"""Stored figures: one small JSON file a case, a folder a device and torch, written whole or not at all. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from accelcheck.measure.regression import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from accelcheck.devices.base import Fingerprint

SCHEMA = 1
"""Version of the file's layout; a reader refuses another one."""
_SUFFIX = ".json"
_PARTIAL = ".partial"
_FIELDS = ("schema", "case", "digest", "device", "ratio", "figures")
_MENDING = "restore the file from version control, or remove it and store the case again with --accel-baseline=new-only"


class BaselineError(ValueError):
    """A stored baseline is not what it should be, or cannot be written; the message names file, field and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """The coarse fingerprint: what must be the same for figures to be held against each other.

    Attributes:
        device: The device's name.
        chip: The processor's name.
        count: How many of them.
        torch: Its minor version, such as ``2.13``.
        runtime: Without its minor version: ``CUDA 13``, ``HIP 7``, ``PJRT CPU``, ``ATen AVX2``.
    """

    device: str
    chip: str
    count: int
    torch: str
    runtime: str

    @classmethod
    def of(cls, fingerprint: Fingerprint) -> Place:
        """Of a device here."""
        torch = ".".join(fingerprint.versions.get("torch", "").split("+")[0].split(".")[:2])
        runtime = re.sub(r"(\d+)\.[\d.]*", r"\1", fingerprint.runtime)
        return cls(fingerprint.device, fingerprint.chip, fingerprint.count, torch, runtime)

    @property
    def slug(self) -> str:
        """Name of the device's folder."""
        return file_name(f"{self.device}-{self.chip}-x{self.count}")

    @property
    def folder(self) -> str:
        """Folder of its baselines, below that of all."""
        return f"{self.slug}/{file_name(f'torch-{self.torch}-{self.runtime}')}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is stored of a case.

    Attributes:
        case: Its id.
        digest: Of all that its work depends on: a case whose workload has changed has no baseline.
        place: Where it was measured.
        ratio: Log ratio of its time to FP32 eager's.
        figures: Other figures of the case, by name, for comparison: in the units of its measurements.
    """

    case: str
    digest: str
    place: Place
    ratio: Sample
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file: never a bare id, which may be long and hold anything."""
        return f"{file_name(self.case)[:80]}-{self.digest}{_SUFFIX}"


class Baselines:
    """The store: a folder of folders.

    Args:
        root: Its folder; need not exist.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, place: Place) -> dict[str, Baseline]:
        """All baselines of a place, by case id.

        Raises:
            BaselineError: A file is not what it should be.
        """
        return {found.case: found for _, found in self.stored(place)}

    def stored(self, place: Place | None = None) -> Iterator[tuple[Path, Baseline]]:
        """All files, sorted by path, and what they hold; of one place or of all.

        Raises:
            BaselineError: A file is not what it should be.
        """
        below = self.root / place.folder if place is not None else self.root
        for path in sorted(below.glob(f"*{_SUFFIX}" if place is not None else f"*/*/*{_SUFFIX}")):
            yield path, _read(path)

    def near(self, place: Place) -> list[Place]:
        """Other places with the same chip: another torch, runtime or number of them.

        Raises:
            BaselineError: A file is not what it should be.
        """
        others = {found.place for _, found in self.stored()} - {place}
        alike = [other for other in others if (other.device, other.chip) == (place.device, place.chip)]
        return sorted(alike, key=lambda other: (other.count != place.count, other.torch, other.runtime))

    def write(self, baseline: Baseline, *, replace: bool) -> bool:
        """Store a baseline: the file is the old one or the new one, whatever happens, and other files are not touched.

        Args:
            baseline: Replaces others of the same case and place.
            replace: Whether to replace a stored one of the same digest.

        Returns:
            Whether it was stored.

        Raises:
            BaselineError: The folder cannot be written.
        """
        folder = self.root / baseline.place.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                path = folder / baseline.name
                if path.exists() and not replace:
                    return False
                partial = folder / f".{baseline.name}{_PARTIAL}"
                with partial.open("w", encoding="ascii") as file:
                    file.write(_text(baseline))
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
                for stale in folder.glob(f"{file_name(baseline.case)[:80]}-*{_SUFFIX}"):
                    if stale != path and _read(stale).case == baseline.case:
                        stale.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise BaselineError(f"{folder}: the baseline of {baseline.case} cannot be written: {reason}") from error
        return True


def digest(*facts: object) -> str:
    """Eight hexadecimal digits of all that a case's work depends on."""
    return hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=4).hexdigest()


def _text(baseline: Baseline) -> str:
    place = baseline.place
    plain = {
        "schema": SCHEMA,
        "case": baseline.case,
        "digest": baseline.digest,
        "device": {
            "name": place.device,
            "chip": place.chip,
            "count": place.count,
            "torch": place.torch,
            "runtime": place.runtime,
        },
        "ratio": {
            "mean": _rounded(baseline.ratio.mean),
            "spread": _rounded(baseline.ratio.spread),
            "processes": baseline.ratio.count,
        },
        "figures": {name: _rounded(value) for name, value in baseline.figures.items()},
    }
    return json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _rounded(value: float) -> float:
    """Six significant digits, for people who read differences; whole numbers, such as bytes, stay exact."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def _read(path: Path) -> Baseline:
    try:
        data = json.loads(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BaselineError(f"{path}: not JSON, or cut short ({error}); {_MENDING}") from error
    reader = _Reader(path)
    table = reader.table(data, "the file")
    if table.get("schema") != SCHEMA:
        raise reader.wrong("schema", f"{SCHEMA}, which this accelcheck reads", table.get("schema"))
    for name in table.keys() - set(_FIELDS):
        raise reader.wrong(name, f"one of {', '.join(_FIELDS)}", "another field")
    device, ratio = reader.table(table.get("device"), "device"), reader.table(table.get("ratio"), "ratio")
    figures = reader.table(table.get("figures"), "figures")
    found = Baseline(
        case=reader.text(table, "case"),
        digest=reader.text(table, "digest"),
        place=Place(
            reader.text(device, "name", "device."),
            reader.text(device, "chip", "device."),
            int(reader.number(device, "count", "device.", least=1)),
            reader.text(device, "torch", "device."),
            reader.text(device, "runtime", "device."),
        ),
        ratio=Sample(
            reader.number(ratio, "mean", "ratio."),
            reader.number(ratio, "spread", "ratio.", least=0),
            int(reader.number(ratio, "processes", "ratio.", least=2)),
        ),
        figures={name: reader.number(figures, name, "figures.", least=0) for name in figures},
    )
    if path.name != found.name:
        raise reader.wrong("case", f"the case and digest of {path.name}", f"{found.case} with {found.digest}")
    if path.parent.parent.name != found.place.slug or not found.place.folder.endswith(path.parent.name):
        raise reader.wrong("device", f"that of the folder {path.parent.parent.name}/{path.parent.name}", found.place)
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path

    def wrong(self, name: str, expected: str, came: object) -> BaselineError:
        return BaselineError(f"{self.path}: field {name!r}: expected {expected}, got {came!r}; {_MENDING}")

    def table(self, value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def text(self, table: Mapping[str, Any], name: str, within: str = "") -> str:
        value = table.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(within + name, "a text", value)
        return value

    def number(self, table: Mapping[str, Any], name: str, within: str, least: float = -math.inf) -> float:
        value = table.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
            limit = "" if least == -math.inf else f" of at least {least:g}"
            raise self.wrong(within + name, f"a finite number{limit}", value)
        return value


def file_name(text: str) -> str:
    """Lower-case letters, digits, dots and hyphens: a file name everywhere, and never a path."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
