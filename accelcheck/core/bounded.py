"""Files that strangers made, read within bounds: a regular file, of a stated size, in lines of a stated length. No torch."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
MOST_FILE = 4096 * MIB
"""Bytes of a file that is read line by line."""
MOST_LINE = 8 * MIB
"""Bytes of one line: a record with 2 texts of 100,000 characters and the figures of thousands of tensors fits."""


class UnreadableFileError(ValueError):
    """A file cannot be read within its bounds; the message names the file, and the line where there is one."""


def lines(path: Path, most_file: int = MOST_FILE, most_line: int = MOST_LINE) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, from 1, each with its line end; only the last one may lack it.

    Args:
        path: A regular file, or a link to one.
        most_file: Bytes that it may have.
        most_line: Bytes that a line may have.

    Raises:
        UnreadableFileError: It cannot be read, is no regular file, or exceeds a bound.
    """
    try:
        # A named pipe without a writer would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UnreadableFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFileError(f"{path} cannot be read: expected a file, got {_kind(found.st_mode)}")
        if found.st_size > most_file:
            raise UnreadableFileError(
                f"{path} cannot be read: expected at most {most_file:,} bytes, got {found.st_size:,}"
            )
        number = 0
        while line := file.readline(most_line + 1):
            number += 1
            if len(line) > most_line:
                raise UnreadableFileError(f"{path}:{number}: expected a line of at most {most_line:,} bytes, got more")
            yield number, line


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")
