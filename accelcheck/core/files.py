"""Files that are written whole or not at all. No torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PARTIAL = ".partial"
"""Suffix of a file that is being written, or that a killed writer left behind."""


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends: a reader finds the old content or the new.

    Where the block raises, `path` stays as it is. Several processes may write at once; the last one wins.

    Args:
        path: In a folder that exists.
        durable: Whether the file outlives a power failure, once the block has ended.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    if durable:
        with suppress(OSError):  # some file systems cannot synchronise folders, and the file is in place
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the file's new name
            finally:
                os.close(folder)


def guarded_folder(prefix: str) -> tuple[Path, Callable[[], None]]:
    """A new temporary folder, and what removes it. It is removed as well when this process is killed, whatever kills it.

    A shell waits for the end of this process: the kernel closes its pipe.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    guard: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # no such shell: then nobody is there when this process is killed
        guard = subprocess.Popen(  # noqa: S603 - a fixed program; the folder is no part of its text
            ["/bin/sh", "-c", 'cat > /dev/null; rm -rf -- "$0"', str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait()

    return folder, remove
