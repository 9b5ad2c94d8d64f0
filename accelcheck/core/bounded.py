"""Reads untrusted files within bounds: regular files of a stated size, in lines of a stated length. No torch.

Each reader raises `UnreadableFileError` where a file cannot be opened, is no regular file, or exceeds a bound.
"""

import io
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

MIB = 1 << 20
MOST_FILE = 4096 * MIB
"""Largest file that is read line by line, in bytes."""
MOST_LINE = 8 * MIB
"""Longest line, in bytes: a record with 2 texts of 100,000 characters and the figures of thousands of tensors fits."""


class UnreadableFileError(ValueError):
    """A file cannot be read within its bounds; the message names the file, and the line where there is one."""


class AbsentFileError(UnreadableFileError):
    """There is no such file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file, such as a member of an archive: `size` bytes from `start` on, under a name in errors."""

    path: Path
    start: int
    size: int
    name: str

    def __str__(self) -> str:
        return self.name


Source: TypeAlias = Path | Piece


class _Window(io.RawIOBase):
    def __init__(self, file: IO[bytes], piece: Piece) -> None:
        self._file, self._left = file, piece.size
        file.seek(piece.start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._file.read(min(len(buffer), self._left))
        buffer[: len(chunk)] = chunk
        self._left -= len(chunk)
        return len(chunk)


def read(source: Source, most: int) -> bytes:
    """All bytes of a file of at most `most`."""
    with opened(source, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew
        raise UnreadableFileError(f"{source} cannot be read: expected at most {most:,} bytes, got more")
    return content


def lines(path: Source, most_file: int = MOST_FILE, most_line: int = MOST_LINE) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1, each with its line end; only the last one may lack it.

    The file may have `most_file` bytes, and a line `most_line`.
    """
    with opened(path, most_file) as file:
        for number in itertools.count(1):
            if not (line := file.readline(most_line + 1)):
                return
            if len(line) > most_line:
                raise UnreadableFileError(f"{path}:{number}: expected a line of at most {most_line:,} bytes, got more")
            yield number, line


@contextmanager
def opened(source: Source, most: int) -> Iterator[IO[bytes]]:
    """A context with a file of at most `most` bytes that is open for reading; raises `AbsentFileError` without one."""
    path = source.path if isinstance(source, Piece) else source
    try:
        # A named pipe without a writer would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        kind = AbsentFileError if isinstance(error, FileNotFoundError) else UnreadableFileError
        raise kind(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)  # `os.fdopen` refuses folders
        raise UnreadableFileError(f"{source} cannot be read: expected a file, got {_kind(status.st_mode)}")
    with os.fdopen(descriptor, "rb") as file:
        size = source.size if isinstance(source, Piece) else status.st_size
        if size > most:
            raise UnreadableFileError(f"{source} cannot be read: expected at most {most:,} bytes, got {size:,}")
        yield io.BufferedReader(_Window(file, source)) if isinstance(source, Piece) else file


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")
