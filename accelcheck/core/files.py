"""Writes files whole or not at all, and keeps temporary ones in a folder that outlives no run. No torch."""

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

SCRATCH = "ACCELCHECK_SCRATCH"
"""Environment variable of child processes with the folder of `scratch`."""
_KNOWN: list[Path] = []
_GUARD = 'cat > /dev/null; for n in 1 2 3 4 5; do rm -rf -- "$0"; [ -e "$0" ] || exit 0; sleep 1; done'
"""Shell script that retries deletion for 5 s, because dying children may still write."""
PARTIAL = ".partial"
"""Suffix of a file that is being written, or that a killed writer left behind."""


def file_name(text: str) -> str:
    """A file name that is valid on every system: the text's letters in lower case, digits, dots and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends: a reader finds the old content or the new.

    `path`, in a folder that exists, stays as it is when the block raises, or the file cannot be written. Several
    processes may write at once; the last one wins. A `durable` file outlives a power failure, once the block has ended.
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


def scratch() -> Path:
    """The folder for temporary files of this process and its children: the first process of a run makes it.

    It is removed when that process ends, even killed, so that files of killed children do not outlive the run.
    """
    for folder in (*_KNOWN, *map(Path, filter(None, [os.environ.get(SCRATCH)]))):
        if folder.is_dir():
            return folder
    folder, remove = _guarded("accelcheck-")
    atexit.register(remove)
    share(folder)
    return folder


def share(folder: Path) -> None:
    """Sets the folder that another process of this run has made."""
    _KNOWN[:] = [folder]  # not the environment, which is part of what cases are judged by


def private(prefix: str) -> Path:
    """A new folder in `scratch`."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=scratch()))


def _guarded(prefix: str) -> tuple[Path, Callable[[], None]]:
    """A new temporary folder, and the function that removes it.

    When this process is killed, the kernel closes the pipe of a waiting shell, which then removes the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    owner = os.getpid()
    guard: subprocess.Popen[bytes] | None = None
    with suppress(OSError):  # no such shell: then the folder outlives a kill of this process
        guard = subprocess.Popen(  # noqa: S603 - a fixed program; the folder is no part of its text
            ["/bin/sh", "-c", _GUARD, str(folder)],
            env={"PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )

    def remove() -> None:
        if os.getpid() != owner:
            return
        shutil.rmtree(folder, ignore_errors=True)
        if guard is not None and guard.stdin is not None:
            if not folder.exists():
                guard.kill()  # a process that was forked from this one may hold the pipe for long
            guard.stdin.close()
            if not folder.exists():
                guard.wait()

    return folder, remove
