"""``torchrun``: real processes on this machine, started as users start them, and what is handed to and fro."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

GRACE = 5.0
"""Seconds that processes have to end after they were asked to."""
PAUSE = 0.01
"""Seconds between two looks at a file or a process."""
SAID = 25
"""Lines of output that an error quotes."""


class RanksError(RuntimeError):
    """Processes ended, raised or stayed silent; the message has their last output."""


class Torchrun:
    """A running ``torchrun`` of this Python; what it and its ranks print goes to a log.

    Args:
        options: Options of torchrun: ``--nproc-per-node=2``, ``--standalone``.
        module: What each rank runs, as ``python -m`` does.
        words: Arguments of the module.
        log: File for the output; created, or appended to.
        environ: Variables besides those of this process.
    """

    def __init__(
        self, options: Sequence[str], module: str, words: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        self.log = log
        inherited = {
            # What this process can import, ranks can: workloads may come from anywhere.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as out:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, "-m", "torch.distributed.run", *options, "-m", module, *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,  # never written to: it ends when this process does, and its ranks see that
                env={**os.environ, **inherited, **environ},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether torchrun itself runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of torchrun itself: the parent of its ranks."""
        return self._process.pid

    def wait(self, seconds: float) -> int:
        """The exit status, when it has ended.

        Raises:
            RanksError: It has not within that time.
        """
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise RanksError(
                f"torchrun runs after {seconds:g} s, expected its end; its output:\n{self.said()}"
            ) from error

    def said(self) -> str:
        """The last lines of the output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-SAID:])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send torchrun itself a signal. Ranks that called `leave_with_parent` end with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def close(self) -> None:
        """End it and its ranks: it hands SIGTERM on to them, and what stays is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.kill(signal.SIGTERM)
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()


def leave_with_parent() -> None:
    """End this rank when torchrun ends, or who started that, however they end: ranks are in sessions of their own.

    For ranks of a `Torchrun`: their standard input is a pipe that nobody writes to.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not select.select([0], [], [], 0.2)[0]:
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave-with-parent").start()


def pickled(value: Any) -> bytes:
    """A value for another process of ours. Not by multiprocessing: tensors would share memory that ends with a process.

    Raises:
        TypeError: It cannot be pickled: made of lambdas or local classes, say.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}; define its classes and functions at the top of a module"
        ) from error


def put(path: Path, value: Any) -> None:
    """Hand a value over in a file: it appears whole or not at all.

    Raises:
        TypeError: As `pickled`.
    """
    content = pickled(value)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def take(path: Path) -> Any:
    """What `put` left in a folder that is private to this run: our own processes are no strangers."""
    return pickle.loads(path.read_bytes())  # noqa: S301 - see above


def awaited(paths: Sequence[Path], seconds: float, run: Torchrun) -> list[Any]:
    """What `put` leaves in each of the files, as soon as all are there.

    Raises:
        RanksError: torchrun ended, or the time is over.
    """
    for _ in looks(seconds):
        if all(path.exists() for path in paths):
            return [take(path) for path in paths]
        if not run.running:
            raise RanksError(f"torchrun ended with {run.wait(0)}, expected results; its output:\n{run.said()}")
    missing = ", ".join(path.name for path in paths if not path.exists())
    raise RanksError(f"no {missing} after {seconds:g} s; the ranks' output:\n{run.said()}")


def looks(seconds: float) -> Iterator[None]:
    """One item a look, for so many seconds, with pauses between them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(PAUSE)
