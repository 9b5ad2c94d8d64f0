"""The layout of a package: a tar archive (ustar) of which every byte follows from the names and the contents of its members.

There is no compression, so nothing can be larger than the file, and one header is legal for a member: no time, no owner, no link, no
device. The same members give the same bytes on any machine, and any other byte is an alteration.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.core import bounded
from accelcheck.core.bounded import MIB, Piece
from accelcheck.core.plain import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import IO

BLOCK = 512
MOST_FILE = 4096 * MIB
"""Bytes of a package."""
MOST_MEMBER = 2048 * MIB
MOST_MEMBERS = 10_000
LONGEST_NAME = 100
NAME = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)?")
"""Of a member: letters, digits and ``._+-``, in one folder at most, so neither absolute nor outside of the archive."""
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder",
    tarfile.FIFOTYPE: "a named pipe",
}
_COMPRESSED = {b"PK": "zip", b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class NotPackageError(ValueError):
    """A file is no package; the message names the file and says what it is instead."""


@dataclass(frozen=True, slots=True)
class FoundMember:
    """A member as it was found.

    Attributes:
        name: Of the member.
        piece: Where its content is.
        problem: What is wrong with its place in the archive; empty where nothing is.
    """

    name: str
    piece: Piece
    problem: str = ""


def legal(name: str) -> bool:
    """Whether a member may have this name."""
    return len(name) <= LONGEST_NAME and NAME.fullmatch(name) is not None


def header(name: str, size: int) -> bytes:
    """The block before the content of a member."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def write(file: IO[bytes], members: Iterable[tuple[str, int, Iterable[bytes]]]) -> None:
    """Write an archive.

    Args:
        file: Where to.
        members: Name, size in bytes and content of each.

    Raises:
        ValueError: A content has another size than was said.
    """
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
    """The first member.

    Raises:
        NotPackageError: It is another one than `name`, or the file is no archive.
    """
    try:
        found = next(walk(path, {}), None)
        start = bounded.read(Piece(path, 0, 8, str(path)), 8)
    except bounded.UnreadableFileError as error:
        raise NotPackageError(str(error)) from error
    if found is None or found.name != name:
        form = next((kind for magic, kind in _COMPRESSED.items() if start.startswith(magic)), "")
        got = f"a {form} file" if form else "a file that begins with something else"
        raise NotPackageError(
            f"{path}: expected a package, an archive whose first member is {name}, got {got}; "
            "accelcheck pack JOURNAL -o FILE makes one"
        )
    return found


def walk(path: Path, expected: Mapping[int, tuple[str, int]]) -> Iterator[FoundMember]:
    """The members, one after the other, and a last one without a name where the end of the archive is not as it should be.

    Args:
        path: Of the archive.
        expected: Name and size of the member that belongs at a byte: what a header that cannot be read should say.

    Raises:
        UnreadableFileError: The file cannot be read, or exceeds a bound.
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
            found = _parsed(block) or (*expected.get(position, ("", -1)), "its header was altered")
            name, size, problem = found
            start = position + BLOCK
            if size < 0 or count == MOST_MEMBERS:
                said = "a header that cannot be read" if size < 0 else f"more than {MOST_MEMBERS:,} members"
                yield FoundMember("", Piece(path, position, 0, str(path)), f"{said}, at byte {position:,}")
                return
            if size > MOST_MEMBER or start + size > end:
                said = f"has {size:,} bytes, and {end - start:,} follow: the file was cut off, or its size altered"
                yield FoundMember(name, Piece(path, start, max(0, min(size, end - start)), f"{path}/{name}"), said)
                return
            position = start + size + -size % BLOCK
            file.seek(start + size)
            if any(file.read(position - start - size)):
                problem = problem or "bytes after its content were altered"
            yield FoundMember(name, Piece(path, start, size, f"{path}/{name}"), problem)


def _parsed(block: bytes) -> tuple[str, int, str] | None:
    """Name and size of a member, and what is wrong with its header; None where it is none."""
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "surrogateescape")
        name, size = text(info.name, LONGEST_NAME), info.size
    except (tarfile.HeaderError, ValueError, OverflowError):
        return None
    if info.type != tarfile.REGTYPE:
        return name, max(0, size), f"is {_KINDS.get(info.type, 'of another kind')}; a package has plain files only"
    if not legal(info.name):
        return name, size, "has a name that no member may have"
    # No header can be made of a size that the form has no digits for; `walk` says what is wrong with it.
    same = 0 <= size <= MOST_MEMBER and header(info.name, size) == block
    return name, size, "" if same else "its header was altered"


def _end(file: IO[bytes], position: int, end: int) -> str:
    """What is wrong after the last member; it should be two empty blocks."""
    file.seek(position)
    if end - position < 2 * BLOCK:
        return f"the file was cut off at byte {end:,}"
    if end - position > 2 * BLOCK or any(file.read(2 * BLOCK)):
        return f"{end - position - 2 * BLOCK:,} bytes more than expected after its last member, or altered ones"
    return ""
