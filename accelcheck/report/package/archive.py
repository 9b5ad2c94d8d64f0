"""Reads and writes a package's layout: a tar archive (ustar) whose bytes follow from its members' names and contents.

There is no compression, so nothing can be larger than the file. A member has one legal header: no time, no owner, no
link, no device. The same members give the same bytes on any machine, and any other byte is an alteration.
"""

import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from accelcheck.core import bounded
from accelcheck.core.bounded import MIB, Piece
from accelcheck.core.errors import InputError
from accelcheck.core.plain import text

BLOCK = 512
MOST_FILE = 4096 * MIB
"""Most bytes of a package."""
MOST_MEMBER = 2048 * MIB
MOST_MEMBERS = 10_000
LONGEST_NAME = 100
NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)?")
"""Legal names: letters, digits and ``._+-``, in one folder at most, so never outside of the archive."""
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a named pipe",
}
_COMPRESSED = {b"PK": "zip", b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class NotPackageError(InputError):
    """A file is no package; the message names the file and its kind."""


@dataclass(frozen=True, slots=True)
class FoundMember:
    """A member in an archive: its name, the place of its content, and the fault of its header or place, if any."""

    name: str
    piece: Piece
    problem: str = ""


def legal(name: str) -> bool:
    """Check a member's name."""
    return len(name) <= LONGEST_NAME and NAME.fullmatch(name) is not None


def header(name: str, size: int) -> bytes:
    """Make the block before a member's content."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def write(file: IO[bytes], members: Iterable[tuple[str, int, Iterable[bytes]]]) -> None:
    """Write an archive of members: name, size in bytes, content; a `ValueError` where a content has another size."""
    for name, size, content in members:
        file.write(header(name, size))
        written = 0
        for chunk in content:
            written += file.write(chunk)
        if written != size:
            raise ValueError(f"{name}: expected {size:,} bytes, got {written:,}: it changed while it was packed")
        file.write(bytes(-size % BLOCK))
    file.write(bytes(2 * BLOCK))


def first(path: Path, name: str) -> FoundMember:
    """Find the first member; a `NotPackageError` where its name is not `name`, or the file is no archive."""
    try:
        member = next(walk(path, {}), None)
        start = bounded.read(Piece(path, 0, 8, str(path)), 8)
    except bounded.UnreadableFileError as error:
        raise NotPackageError(str(error)) from error
    if member is None or member.name != name:
        form = next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), "")
        got = f"a {form} file" if form else "a file that begins with something else"
        raise NotPackageError(
            f"{path}: expected a package, an archive whose first member is {name}, got {got}; "
            "accelcheck pack JOURNAL -o FILE makes one"
        )
    return member


def walk(path: Path, expected: Mapping[int, tuple[str, int]]) -> Iterator[FoundMember]:
    """Walk over the members; a last one without a name stands for a wrong end of the archive.

    `expected` has name and size of the member that belongs at a byte, which replace a header that cannot be read. An
    `UnreadableFileError` where the file cannot be read, or exceeds a bound.
    """
    with bounded.opened(path, MOST_FILE) as file:
        end = file.seek(0, 2)
        position = 0
        for count in range(MOST_MEMBERS + 1):
            file.seek(position)
            block = file.read(BLOCK)
            if not any(block):
                if problem := _end(file, position, end):
                    yield FoundMember("", Piece(path, position, 0, str(path)), problem)
                return
            name, size, problem = _parsed(block) or (*expected.get(position, ("", -1)), "its header was altered")
            start = position + BLOCK
            if size < 0 or count == MOST_MEMBERS:
                problem = "a header that cannot be read" if size < 0 else f"more than {MOST_MEMBERS:,} members"
                yield FoundMember("", Piece(path, position, 0, str(path)), f"{problem}, at byte {position:,}")
                return
            if size > MOST_MEMBER or start + size > end:
                problem = f"has {size:,} bytes, and {end - start:,} follow: the file was cut off, or its size altered"
                yield FoundMember(name, Piece(path, start, max(0, min(size, end - start)), f"{path}/{name}"), problem)
                return
            position = start + size + -size % BLOCK
            file.seek(start + size)
            if any(file.read(position - start - size)):
                problem = problem or "bytes after its content were altered"
            yield FoundMember(name, Piece(path, start, size, f"{path}/{name}"), problem)


def _parsed(block: bytes) -> tuple[str, int, str] | None:
    """Parse a header: name, size, and its fault; None where it is no header."""
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "surrogateescape")
        name, size = text(info.name, LONGEST_NAME), info.size
    except (tarfile.HeaderError, ValueError, OverflowError):
        return None
    if info.type != tarfile.REGTYPE:
        return name, max(0, size), f"is {_KINDS.get(info.type, 'of another kind')}; a package has plain files only"
    if not legal(info.name):
        return name, size, "has a name that no member may have"
    # The format has no digits for other sizes, which `walk` reports.
    same = 0 <= size <= MOST_MEMBER and header(info.name, size) == block
    return name, size, "" if same else "its header was altered"


def _end(file: IO[bytes], position: int, end: int) -> str:
    """Check the end of the archive, which is two empty blocks."""
    file.seek(position)
    if end - position < 2 * BLOCK:
        return f"the file was cut off at byte {end:,}"
    if end - position > 2 * BLOCK or any(file.read(2 * BLOCK)):
        return f"{end - position - 2 * BLOCK:,} bytes more than expected after its last member, or altered ones"
    return ""
