"""Must-pass lists: the cases that a device of a class has to pass at each level, versioned and hashed. No torch.

A package may ship a list with its device: the file ``must_pass/DEVICE.txt`` beside the module of the device's entry
point. It adds to the list `OTHERS` and takes nothing out: a vendor cannot qualify by asking for less.

A list holds the cases that devices of its class declare to support, less those that the shipped ledgers expect to fail,
and less those that a measured run found `unsupported` by trying. It has no timed cases, which need a baseline of the
same machine, and no platform items, which an assessment counts. ``nox -s regenerate`` makes the lists; a new case
enters one when a run has passed it.
"""

import fnmatch
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from accelcheck.core import entry_points
from accelcheck.core.case import LEVELS, Mode
from accelcheck.core.errors import InputError
from accelcheck.core.selection import Selection

OTHERS = "accelerator"
"""The class of every device that has no list of its own."""
FOLDER = "must_pass"
SUFFIX = ".txt"


class MustPassError(InputError):
    """A must-pass list is malformed; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Least numbers of a whole run at a level: executed cases, techniques with one, and elements compared.

    Of elements it is 0 where no run of the class was measured, since devices differ in the inputs that they take.
    """

    cases: int
    techniques: int
    elements: int


@dataclass(frozen=True, slots=True)
class MustPass:
    """The list of one class of devices.

    Attributes:
        kind: Class: a device's name, or `OTHERS`.
        version: Number that rises whenever the list changes.
        digest: SHA-256 of the file, in hexadecimal digits; for the list of a package, of the package's own file.
        measured: Highest level at which a run of the class confirmed the list; 0 where none did.
        levels: Level by case id without the device: ``technique/workload/dtype/mode``.
        floors: Least numbers by level.
    """

    kind: str
    version: int
    digest: str
    measured: int
    levels: Mapping[str, int]
    floors: Mapping[int, Floor]

    def ids(self, device: str, level: int) -> set[str]:
        """The ids of the cases that a device has to pass up to a level."""
        return {identity(key, device) for key, its in self.levels.items() if its <= level}

    def selected(self, selection: Selection, device: str) -> set[str]:
        """The ids of the cases that a selection of the matrix has to contain; none for a selection by case ids."""
        if selection.cases:
            return set()
        return {
            identity(key, device)
            for key, its in self.levels.items()
            if its <= selection.level and _chosen(key, selection)
        }

    def facts(self) -> dict[str, str | int]:
        """The facts about the list in a journal's header."""
        return {"class": self.kind, "version": self.version, "sha256": self.digest}


def of(device: str) -> MustPass:
    """The list for a device; raises `MustPassError` where the one that a package ships with it is malformed."""
    return stored().get(device) or _of_package(device)


def shipped(device: str) -> Path | None:
    """The file of the list that a package ships with a device; None without one, and for accelcheck's own devices."""
    return None if device in stored() else entry_points.beside(device, FOLDER, f"{device}{SUFFIX}")


@functools.cache
def _of_package(device: str) -> MustPass:
    """The list `OTHERS` with the additions of the device's package."""
    base = stored()[OTHERS]
    file = shipped(device)
    if file is None:
        return base
    try:
        own = parsed(device, file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError) as error:
        raise MustPassError(f"{FOLDER}/{device}{SUFFIX}: {error}") from error
    levels = {**own.levels, **{key: min(its, own.levels.get(key, its)) for key, its in base.levels.items()}}
    floors = {level: Floor(*map(max, astuple(base.floors[level]), astuple(own.floors[level]))) for level in LEVELS}
    return replace(own, levels=levels, floors=floors)  # accelcheck's version, which headers name, tells the other list


@functools.cache
def stored() -> Mapping[str, MustPass]:
    """The lists of the package by class."""
    folder = resources.files(__package__).joinpath(FOLDER)
    files = sorted((file for file in folder.iterdir() if file.name.endswith(SUFFIX)), key=lambda file: file.name)
    return MappingProxyType(
        {(kind := file.name.removesuffix(SUFFIX)): parsed(kind, file.read_text(encoding="ascii")) for file in files}
    )


def identity(key: str, device: str) -> str:
    """The id of a case on a device, from its key in a list."""
    technique, workload, dtype, mode = key.split("/")
    return f"{technique}/{workload}/{device}/{dtype}/{mode}"


def parsed(kind: str, text: str) -> MustPass:
    """Read a list; raises `MustPassError`, whose message names the line, where it is malformed."""
    head: dict[str, int] = {}
    floors: dict[int, Floor] = {}
    levels: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            _read(line, head, floors, levels)
        except ValueError as error:
            raise MustPassError(f"{FOLDER}/{kind}{SUFFIX}:{number}: {error}") from error
    if set(head) != {"version", "measured"} or set(floors) != set(LEVELS):
        expected = "a version, what was measured, and a floor for each level"
        raise MustPassError(f"{FOLDER}/{kind}{SUFFIX}: expected {expected}")
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return MustPass(kind, head["version"], digest, head["measured"], levels, floors)


def _read(line: str, head: dict[str, int], floors: dict[int, Floor], levels: dict[str, int]) -> None:
    word, *words = line.split()
    match word:
        case "version" | "measured":
            (head[word],) = map(int, words)
        case "floor":
            level, cases, techniques, elements = map(int, words)
            floors[level] = Floor(cases, techniques, elements)
        case "case":
            technique, dtype, mode, its, *workloads = words
            levels.update({f"{technique}/{workload}/{dtype}/{Mode(mode)}": int(its) for workload in workloads})
        case _:
            raise ValueError(f"expected version, measured, floor or case, got {word!r}")


def written(version: int, measured: int, levels: Mapping[str, int], floors: Mapping[int, Floor]) -> str:
    """The text of a list, which `parsed` reads."""
    lines = [f"version {version}", f"measured {measured}"]
    lines += [f"floor {level} {f.cases} {f.techniques} {f.elements}" for level, f in sorted(floors.items())]
    groups: dict[tuple[str, str, str, int], list[str]] = {}
    for key, level in levels.items():
        technique, workload, dtype, mode = key.split("/")
        groups.setdefault((technique, dtype, mode, level), []).append(workload)
    for (technique, dtype, mode, level), workloads in sorted(groups.items()):
        lines.append(f"case {technique} {dtype} {mode} {level} {' '.join(sorted(workloads))}")
    return "\n".join(lines) + "\n"


def _chosen(key: str, selection: Selection) -> bool:
    technique, workload, dtype, _ = key.split("/")
    named = ((technique, selection.techniques), (workload, selection.workloads))
    fits = all(not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name, globs in named)
    return fits and (not selection.dtypes or dtype in selection.dtypes)
