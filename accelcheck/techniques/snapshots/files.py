"""Snapshots of a training in files: written whole or not at all, protected by a digest, read as data.

A file is one line of JSON (format, version, size and SHA-256 of the rest), then the output of ``torch.save``. Tensors
are on the CPU, so that any device can continue from them. ``torch.load`` reads a file with ``weights_only=True``: no
code in it runs. Sharded tensors are for ``torch.distributed.checkpoint``.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from accelcheck.core.files import PARTIAL, replacing
from accelcheck.workloads.states import pack, unpack

FORMAT = "accelcheck-snapshot"
VERSION = 1
LONGEST_HEADER = 1024
"""Longest first line that can be a header, in bytes."""

_NAME = re.compile(r"step-(\d{8,})\.snapshot")


class DamagedError(ValueError):
    """Raised for a file that is no intact snapshot. The message names the file, and what was expected and found."""

    def __init__(self, path: Path, wrong: str) -> None:
        super().__init__(path, wrong)
        self.path = path
        self.wrong = wrong

    def __str__(self) -> str:
        return f"{self.path}: {self.wrong}"


@dataclass(frozen=True)
class Snapshot:
    """Snapshot that was read: steps taken, the state on the CPU, and newer snapshots that are damaged, newest first."""

    path: Path
    step: int
    state: dict[str, Any]
    refused: tuple[DamagedError, ...] = ()


class Snapshots:
    """Folder with the newest snapshots of one training.

    Processes may share the folder: a lock lets one at a time read or write, and a killed process releases it. With a
    `keep` of two snapshots, a damaged one costs the steps since the previous one. Raises a ValueError for less than 1.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1 snapshot, got {keep}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.keep = keep
        self._lock = FileLock(folder / ".lock")

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes the state after `step` steps, then removes all but the newest snapshots.

        Raises a TypeError where `write` does, and a ValueError for a negative number of steps.
        """
        if step < 0:
            raise ValueError(f"step: expected a number from 0, got {step}")
        path = self.folder / f"step-{step:08}.snapshot"
        with self._lock:
            write(path, state)
            for _, old in self._found()[self.keep :]:
                old.unlink()
            for partial in self.folder.glob(f".*{PARTIAL}"):  # of killed writers: this one holds the lock
                partial.unlink()
        return path

    def latest(self) -> Snapshot | None:
        """Reads the newest intact one; None if there are no snapshots.

        Raises `DamagedError`, which says why, if all are damaged: the user decides whether to start again.
        """
        refused: list[DamagedError] = []
        with self._lock:
            for step, path in self._found():
                try:
                    return Snapshot(path, step, read(path), tuple(refused))
                except DamagedError as error:
                    refused.append(error)
        if refused:
            reasons = "; ".join(f"{error.path.name}: {error.wrong}" for error in refused)
            raise DamagedError(self.folder, f"expected an intact snapshot, all {len(refused)} are damaged: {reasons}")
        return None

    def _found(self) -> list[tuple[int, Path]]:
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(((int(name[1]), path) for name, path in named if name), reverse=True)


def write(path: Path, state: Mapping[str, Any]) -> int:
    """Writes a snapshot, of which readers find the old file or the new, even if this process is killed.

    The state has tensors of any device, numbers, text, and dicts, lists and tuples of them. Returns the bytes written.
    Raises a TypeError, with its path, for anything else, which could be written but not read.
    """
    content = pack(state)
    header = {"format": FORMAT, "version": VERSION, "bytes": len(content), "sha256": _digest(content)}
    with replacing(path) as file:
        return file.write(json.dumps(header).encode() + b"\n") + file.write(content)


def read(path: Path) -> dict[str, Any]:
    """Reads the state of a snapshot, with all tensors on the CPU.

    Raises `DamagedError` if the file is incomplete, has changed, or is no snapshot; FileNotFoundError if there is none.
    """
    with path.open("rb") as file:
        header = _header(path, file.readline(LONGEST_HEADER))
        content = file.read()
    if len(content) != header["bytes"]:
        raise DamagedError(path, f"size: expected {header['bytes']} bytes after the header, got {len(content)}")
    if (digest := _digest(content)) != header["sha256"]:
        raise DamagedError(path, f"SHA-256: expected {header['sha256']}, got {digest}")
    try:
        state = unpack(content)
    except Exception as error:  # torch raises various errors for foreign files
        raise DamagedError(path, f"expected tensors and plain values, torch.load refused: {error}") from error
    if not isinstance(state, dict):
        raise DamagedError(path, f"expected a dict, got {type(state).__name__}")
    return state


def _header(path: Path, line: bytes) -> dict[str, Any]:
    """Parses the first line."""
    if not line:
        raise DamagedError(path, "expected a header, got an empty file")
    if not line.endswith(b"\n"):
        raise DamagedError(path, f"expected a header of one line, its end is missing after {len(line)} bytes")
    try:
        header = json.loads(line)
    except ValueError as error:
        raise DamagedError(path, f"expected a header in JSON: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise DamagedError(path, f"format: expected {FORMAT!r}, got {got!r}")
    if header.get("version") != VERSION:
        raise DamagedError(path, f"version: expected {VERSION}, got {header.get('version')!r}")
    size, digest = header.get("bytes"), header.get("sha256")
    if type(size) is not int or size < 0:
        raise DamagedError(path, f"bytes: expected a number, got {size!r}")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise DamagedError(path, f"sha256: expected 64 hexadecimal digits, got {digest!r}")
    return header


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
