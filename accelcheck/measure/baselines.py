"""Stored figures: a JSON file per case, in a folder per device and torch version, written atomically. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from accelcheck.core import bounded, strangers
from accelcheck.core.errors import InputError
from accelcheck.core.files import PARTIAL, file_name, replacing
from accelcheck.core.strangers import quoted
from accelcheck.devices.base import Fingerprint
from accelcheck.measure.regression import Sample

SCHEMA = 1
"""Version of the file's layout; other versions are refused."""
_SUFFIX = ".json"
CHOOSING = frozenset(
    """ASCEND_RT_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL HIP_VISIBLE_DEVICES
    ROCR_VISIBLE_DEVICES TPU_LIBRARY_PATH TPU_VISIBLE_CHIPS XLA_PERSISTENT_CACHE_PATH ZE_AFFINITY_MASK""".split()
)
"""Variables that only select chips or files; kind and number of chips are part of the place."""
_STEEPEST = 20.0
"""Logarithm of the largest plausible ratio, half a billion."""
_LARGEST = 2**16
"""Largest size of a file in bytes; those of accelcheck have up to 3,000."""
_FIELDS = ("schema", "case", "digest", "device", "ratio", "figures")
_MENDING = "restore the file from version control, or remove it and store the case again with --accel-baseline=new-only"


class BaselineError(InputError):
    """A stored baseline is invalid or cannot be written; the message names the file, the field and what to do."""


@dataclass(frozen=True, slots=True)
class Place:
    """The coarse fingerprint, which comparable figures share.

    Attributes:
        count: Number of processors.
        torch: Major and minor version, such as ``2.13``.
        runtime: Runtime without its minor version: ``CUDA 13``, ``HIP 7``, ``PJRT CPU``, ``ATen AVX2``.
    """

    device: str
    chip: str
    count: int
    torch: str
    runtime: str

    @classmethod
    def of(cls, fingerprint: Fingerprint) -> Place:
        """The place of a device on this machine."""
        version = fingerprint.versions.get("torch") or metadata.version("torch")
        torch = ".".join(version.split("+")[0].split(".")[:2])
        runtime = re.sub(r"(\d+)\.[\w.+-]*", r"\1", fingerprint.runtime)
        return cls(fingerprint.device, fingerprint.chip or "unknown", fingerprint.count, torch, runtime or "unknown")

    @property
    def slug(self) -> str:
        """Name of the device's folder."""
        return file_name(f"{self.device}-{self.chip}-x{self.count}")

    @property
    def folder(self) -> str:
        """Folder of its baselines, below the root."""
        return f"{self.slug}/{file_name(f'torch-{self.torch}-{self.runtime}')}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The stored figures of a case.

    Attributes:
        digest: Digest of the case's work; a case whose workload has changed has no baseline.
        ratio: Log ratio of its time to FP32 eager's.
        figures: Other figures of the case, by name, in the units of its measurements.
        environment: Variables that were set and change speed, by name; figures with other settings are not comparable.
    """

    case: str
    digest: str
    place: Place
    ratio: Sample
    figures: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file."""
        return _name(self.case, self.digest)


def settings(fingerprint: Fingerprint) -> dict[str, str]:
    """The set variables that comparable figures must share."""
    return {name: value for name, value in fingerprint.environment.items() if name not in CHOOSING}


class Baselines:
    """The store: a folder of folders, which need not exist. Reading raises `BaselineError` for an invalid file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, place: Place) -> dict[str, Baseline]:
        """All baselines of a place, by case id; the last one where `cases` has several."""
        return {case: baselines[-1] for case, baselines in self.cases(place).items()}

    def cases(self, place: Place) -> dict[str, list[Baseline]]:
        """All baselines of a place, by case id: several if a writer was killed or two branches were merged."""
        baselines: dict[str, list[Baseline]] = {}
        for _, baseline in self.stored(place):
            baselines.setdefault(baseline.case, []).append(baseline)
        return baselines

    def stored(self, place: Place | None = None) -> Iterator[tuple[Path, Baseline]]:
        """All files and their baselines, sorted by path, of one place or of all."""
        if place is not None:
            folders = [self.root / place.folder]
        else:
            folders = [folder for device in _listed(self.root) for folder in _listed(device)]
        for path in (path for folder in folders for path in _listed(folder) if path.suffix == _SUFFIX):
            baseline = _read(path)
            if baseline is not None:  # None: another run has replaced it after a change of the workload
                yield path, baseline

    def near(self, place: Place, case: str, digest: str) -> list[Baseline]:
        """Baselines of a case with another torch, runtime or number of the same chips, the nearest first.

        They are for information only, so invalid files are ignored.
        """
        baselines = []
        for path in sorted(self.root.glob(f"*/*/{_name(case, digest)}")):
            with contextlib.suppress(BaselineError):
                baselines.append(_read(path))
        others = [
            baseline
            for baseline in baselines
            if baseline is not None
            and (baseline.place.device, baseline.place.chip) == (place.device, place.chip)
            and baseline.case == case
            and baseline.place != place
        ]
        return sorted(others, key=lambda baseline: _distance(baseline.place, place))

    def writable(self, place: Place) -> None:
        """Check that baselines can be stored, before hours of measuring; a `BaselineError` where they cannot."""
        folder = self.root / place.folder
        # os.path.exists is False for paths below an unreadable folder, where pathlib raises.
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 - see above
        if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):  # noqa: PTH112 - see above
            raise BaselineError(
                f"{there}: expected a folder that can be written, for baselines; name another with --accel-baselines"
            )

    def write(self, baseline: Baseline, *, replace: bool) -> bool:
        """Store a baseline atomically, in place of others of its case and place, and return True.

        A stored one with the same digest stays, and the result is False, unless `replace`. A `BaselineError` where the
        folder cannot be written.
        """
        folder = self.root / baseline.place.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                path = folder / baseline.name
                kept = path.exists() and not replace
                if not kept:
                    with replacing(path) as file:
                        file.write(_text(baseline).encode("ascii"))
                for stale in folder.glob(f"{file_name(baseline.case)[:80]}-*{_SUFFIX}"):
                    if stale != path and (other := _read(stale)) is not None and other.case == baseline.case:
                        stale.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise BaselineError(f"{folder}: the baseline of {baseline.case} cannot be written: {reason}") from error
        return not kept

    def partial(self) -> list[Path]:
        """Unfinished files: left by killed writers, or being written."""
        return sorted(self.root.glob(f"*/*/.*{PARTIAL}"))

    def remove(self, path: Path) -> None:
        """Remove a file while holding the lock of its folder; a `BaselineError` where it cannot be removed."""
        try:
            with FileLock(path.parent / ".lock"):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BaselineError(f"{path}: cannot be removed: {error.strerror or error}") from error


def _text(baseline: Baseline) -> str:
    place = baseline.place
    plain = {
        "schema": SCHEMA,
        "case": baseline.case,
        "digest": baseline.digest,
        "device": {
            "name": place.device,
            **{name: getattr(place, name) for name in ("chip", "count", "torch", "runtime")},
            "environment": dict(baseline.environment),
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
    """Round to six significant digits, to keep diffs readable; whole numbers, such as bytes, stay exact."""
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def _listed(folder: Path) -> list[Path]:
    """Sorted entries of a folder; none if it is absent. Raises for a folder that cannot be read, unlike a glob."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BaselineError(f"{folder}: cannot be read: {error.strerror or error}") from error


def _distance(place: Place, other: Place) -> tuple[object, ...]:
    """Distance of two places with the same chip: by the number of chips, then torch, then the runtime."""
    versions = [[int(number) for number in re.findall(r"\d+", text)] for text in (place.torch, other.torch)]
    apart = [abs(a - b) for a, b in zip(*versions, strict=False)]
    return place.count != other.count, apart, place.runtime != other.runtime, place.torch, place.runtime


def _read(path: Path) -> Baseline | None:
    """Read a baseline; None if there is no such file. A `BaselineError` if it cannot be read, or is no baseline."""
    try:
        data = strangers.json(bounded.read(path, _LARGEST))
    except bounded.AbsentFileError:
        return None
    except bounded.UnreadableFileError as error:
        raise BaselineError(str(error)) from error
    except strangers.StrangerError as error:
        raise BaselineError(f"{path}: {error}; it may be cut short: {_MENDING}") from error
    reader = _Reader(path)
    table = reader.table(data, "the file")
    if table.get("schema") != SCHEMA:
        raise reader.wrong("schema", f"{SCHEMA}, which this accelcheck reads", table.get("schema"))
    for name in table.keys() - set(_FIELDS):
        raise reader.wrong(name, f"one of {', '.join(_FIELDS)}", "another field")
    device, ratio = reader.table(table.get("device"), "device"), reader.table(table.get("ratio"), "ratio")
    figures = reader.table(table.get("figures"), "figures")
    environment = reader.table(device.get("environment"), "device.environment")
    baseline = Baseline(
        case=reader.text(table, "case"),
        digest=reader.text(table, "digest"),
        place=Place(
            reader.text(device, "name", "device."),
            reader.text(device, "chip", "device."),
            reader.whole(device, "count", "device.", least=1),
            reader.text(device, "torch", "device."),
            reader.text(device, "runtime", "device."),
        ),
        ratio=Sample(
            reader.number(ratio, "mean", "ratio.", least=-_STEEPEST, most=_STEEPEST),
            reader.number(ratio, "spread", "ratio.", least=0, most=_STEEPEST),
            reader.whole(ratio, "processes", "ratio.", least=2),
        ),
        figures={name: reader.number(figures, name, "figures.", least=0, most=1e30) for name in figures},
        environment={name: reader.text(environment, name, "device.environment.", empty=True) for name in environment},
    )
    if path.name != baseline.name:
        raise reader.wrong("case", f"the case and digest of {path.name}", f"{baseline.case} with {baseline.digest}")
    if path.parent.parent.name != baseline.place.slug or not baseline.place.folder.endswith(path.parent.name):
        raise reader.wrong("device", f"that of the folder {path.parent.parent.name}/{path.parent.name}", baseline.place)
    return baseline


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path

    def wrong(self, name: str, expected: str, came: object) -> BaselineError:
        got = f"expected {expected}, got {quoted(came)}"
        return BaselineError(f"{self.path}: field {quoted(name, 80)}: {got}; {_MENDING}")

    def table(self, value: object, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def text(self, table: Mapping[str, Any], name: str, within: str = "", *, empty: bool = False) -> str:
        value = table.get(name)
        if not isinstance(value, str) or not (value or empty):
            raise self.wrong(within + name, "a text", value)
        return value

    def number(self, table: Mapping[str, Any], name: str, within: str, least: float, most: float) -> float:
        value = table.get(name)
        # NaN is in no range.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise self.wrong(within + name, f"a number from {least:g} to {most:g}", value)
        return value

    def whole(self, table: Mapping[str, Any], name: str, within: str, least: int) -> int:
        value = self.number(table, name, within, least, most=1e6)
        if value != int(value):
            raise self.wrong(within + name, "a whole number", value)
        return int(value)


def _name(case: str, digest: str) -> str:
    """Name of a baseline's file. An id alone may be too long, and may contain any character."""
    return f"{file_name(case)[:80]}-{digest}{_SUFFIX}"
