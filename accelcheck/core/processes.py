"""Child processes: one way to start, watch and end them, and to exchange messages with them. No torch.

A child prints to a file, because a pipe stays open as long as any process that the child started. While it runs it reports
by messages: JSON lines that `say` appends to a second file. Python values, such as tensors, go through a `Mailbox`, whose files
hold pickles. execnet does not fit: its gateway threads would disturb a process that measures, torchrun starts its ranks itself,
and a gateway that a backend crashes does not tell what the backend printed last.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from accelcheck.core.case import Verdict
from accelcheck.core.files import SCRATCH, replacing, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

LINES = 25
"""Last lines of output that an error quotes."""
GRACE = 5.0
"""Seconds that a process has to end after SIGTERM."""
PAUSE = 0.01
"""Seconds between two looks at a mailbox."""

_MESSAGES = "ACCELCHECK_MESSAGES"
"""In the environment of a child and of what it starts: the file that `say` appends to."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 1, 36, 0x59616D61  # of <linux/prctl.h>

Message = dict[str, Any]


class ChildError(RuntimeError):
    """A child process ended, raised or was silent for too long; the message quotes its last output."""


@dataclass(frozen=True, slots=True)
class End:
    """How a child ended.

    Attributes:
        code: Exit status; the negative number of the signal that killed it.
        limit: Seconds after which it was killed; None where it ended by itself.
        silent: Whether the limit was on its silence.
    """

    code: int
    limit: float | None = None
    silent: bool = False

    @property
    def verdict(self) -> Verdict:
        """Of the case during which it ended."""
        return Verdict.CRASH if self.limit is None else Verdict.HANG

    @property
    def how(self) -> str:
        """The status or the signal that it ended with by itself, such as ``status 3`` or ``SIGSEGV``; empty where it was killed."""
        if self.limit is not None:
            return ""
        if self.code >= 0:
            return f"status {self.code}"
        names = {one.value: one.name for one in signal.Signals}
        return names.get(-self.code, f"signal {-self.code}")  # real-time signals have no names

    def __str__(self) -> str:
        if self.limit is not None:
            what = "was silent for" if self.silent else "ran for longer than"
            return f"{what} {self.limit:g} s and was killed"
        return f"ended with {self.how}" if self.code >= 0 else f"died of {self.how}"


def calling(function: str, *arguments: object, parent: bool = False) -> list[str]:
    """Arguments of an interpreter that calls a function, ``package.module:name``, with a list of texts.

    The process that runs it is killed when its parent ends (`end_with_parent`).

    Args:
        function: Its result, unless it is None, is the exit status.
        *arguments: Of the function.
        parent: Whether this process starts the interpreter; otherwise a child of it does, such as torchrun.
    """
    return ["-m", __name__, str(os.getpid()) if parent else "-", function, *map(str, arguments)]


class Child:
    """A running Python program; a context, which ends the program and everything that it has started.

    Start it in a thread that lives as long as the child: the kernel kills a child of `calling` with the thread that started it.

    Args:
        arguments: Of the interpreter; `calling` makes them for a function.
        environ: Variables besides those of this process.
        python: The interpreter. By default this one, with the import path of this process, whatever made that path.
        cwd: Working directory; by default that of this process.

    Raises:
        OSError: The interpreter cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        python: str | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="child-", dir=scratch())
        self._output, self._messages = (Path(self._folder.name) / name for name in ("output", "messages"))
        self._messages.touch()
        self._killed: tuple[float | None, bool] = (None, False)
        self.started = time.monotonic()
        # Safe: `-m` would put the working folder, which may hold a `torch` or a `queue.py`, before all of these.
        path = {"PYTHONPATH": os.pathsep.join(place or str(Path.cwd()) for place in sys.path), "PYTHONSAFEPATH": "1"}
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603 - an interpreter, with arguments of our own
                    [python or sys.executable, *arguments],
                    cwd=cwd,
                    env={
                        **os.environ,
                        **({} if python else path),
                        "PYTHONFAULTHANDLER": "1",  # a crash prints where
                        **(environ or {}),
                        _MESSAGES: str(self._messages),
                        SCRATCH: str(scratch()),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that its process group can be killed
                )
        except OSError:
            self._folder.cleanup()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the program runs, or is stopped."""
        return self._process.returncode is None and self._state(os.WEXITED | os.WNOHANG) is None

    def wait(
        self, limit: float | None = None, *, since: float | None = None, silence: bool = False, turns: bool = False
    ) -> End | None:
        """Wait until the child ends. It is not polled: that would take time from the cores that it measures.

        Args:
            limit: Seconds after which the child and what it has started are killed.
            since: Reading of `time.monotonic` from which the limit counts; by default it counts from now.
            silence: Start the limit anew when the child says something; it is killed within twice the limit then.
            turns: Return as well when the child has stopped itself (`stop`).

        Returns:
            How it ended; None where it has stopped itself.
        """
        if self._process.returncode is not None:
            return End(self._process.returncode, *self._killed)
        over = threading.Event()
        passed = 0.0 if since is None else time.monotonic() - since
        watcher = threading.Thread(target=self._watch, args=(limit, passed, over, silence), daemon=True)
        watcher.start()
        try:
            state = self._state(os.WEXITED | (os.WSTOPPED if turns else 0))
        finally:
            over.set()
            watcher.join()
        if state is None or state.si_code not in {os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED}:
            return None
        return End(state.si_status if state.si_code == os.CLD_EXITED else -state.si_status, *self._killed)

    def go_on(self) -> None:
        """Let a child run that has stopped itself."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def output(self) -> str:
        """Everything that it and what it started have printed."""
        return self._output.read_text(errors="replace")

    def last(self, lines: int = LINES) -> str:
        """The last lines of the output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def messages(self) -> list[Message]:
        """What it has said until now. A line that a crash cut short is left out."""
        found: list[Message] = []
        for line in self._messages.read_text(errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                message = json.loads(line)
                found += [message] if isinstance(message, dict) else []
        return found

    def end(self, grace: float = 0.0) -> None:
        """End the program and what it has started, and remove their files.

        Args:
            grace: Seconds that the program has, after a SIGTERM, to end by itself.
        """
        if self._process.returncode is not None:
            return
        tree = self._tree()
        if grace:
            self.signal(signal.SIGTERM)
            self.wait(grace)
        self._kill(tree)
        self._process.wait()
        if tree:
            _psutil().wait_procs(tree, timeout=1.0)
        self._folder.cleanup()

    def _state(self, options: int) -> os.waitid_result | None:
        # The process stays a zombie until `end`: its number, which is also its group's, is given to no other one.
        return os.waitid(os.P_PID, self.pid, options | os.WNOWAIT)

    def _watch(self, limit: float | None, passed: float, over: threading.Event, silence: bool) -> None:  # noqa: FBT001 - a thread's
        pause = None if limit is None else max(0.0, limit - passed)
        said = self._messages.stat().st_size
        while not over.wait(pause):
            size = self._messages.stat().st_size
            if not silence or size == said:
                if self.running:
                    self._killed = limit, silence
                    self._kill(self._tree())
                return
            said, pause = size, limit

    def _tree(self) -> list[Any]:
        psutil = _psutil()
        with suppress(psutil.Error):
            return list(psutil.Process(self.pid).children(recursive=True))
        return []

    def _kill(self, tree: Sequence[Any]) -> None:
        for process in tree:
            with suppress(_psutil().Error):
                process.kill()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also what has lost its parent, and is in no tree


def _psutil() -> Any:
    import psutil  # type: ignore[import-untyped]  # it comes without annotations

    return psutil  # imported late: it takes longer than the rest of the plugin's start


# In the child.


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends; on Linux alone.

    A process that is stopped, or is measuring, would not notice by itself, and would disturb what is measured next.

    Args:
        parent: The process that started this one, where it is known: it may have ended already.
        number: Signal that the kernel sends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_at_once() -> None:
    """End this process without tearing backends down: one that crashes or hangs at exit has answered all the same."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def adopt_orphans() -> None:
    """Have the kernel give this process what its children have started, when they end before it; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def let_trace(pid: int) -> None:
    """Let debuggers that a process starts look into this one, where the kernel lets them look into their descendants only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def kill_tree(pid: int, *, itself: bool = True) -> None:
    """Kill a process, and everything that it has started and that has not lost its parent.

    Args:
        pid: Its number.
        itself: Whether to kill the process too, and not its children alone.
    """
    psutil = _psutil()
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), *([process] if itself else [])]:
            with suppress(psutil.Error):
                one.kill()


def say(**message: Any) -> None:
    """Report to the parent; without a parent that listens, print it. The line is written at once and as a whole."""
    line = json.dumps(message) + "\n"
    path = os.environ.get(_MESSAGES)
    if path is None:
        print(line, end="", flush=True)
        return
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def stop() -> None:
    """Stop all threads of this process until the parent lets them go on."""
    signal.raise_signal(signal.SIGSTOP)


# Python values, in both directions.


def _pickled(value: Any) -> bytes:
    """A pickle; of lambdas and local classes, such as somebody's own loss, the code itself is sent."""
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps(value)  # not multiprocessing's: tensors would share memory that ends with a process
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}; define its classes and functions at the top of a module, without open files, locks "
            "and generators"
        ) from error
    return content


@dataclass(frozen=True)
class Mailbox:
    """A folder, private to a run, in which our own processes leave each other values, each under a name.

    Attributes:
        folder: Exists.
    """

    folder: Path

    def put(self, name: str, value: Any) -> None:
        """Leave a value; whoever looks finds all of it or nothing.

        Raises:
            TypeError: It cannot be pickled: it holds an open file or a lock, say.
        """
        content = _pickled(value)
        with replacing(self.folder / name, durable=False) as file:
            file.write(content)

    def has(self, name: str) -> bool:
        """Whether there is a value under a name."""
        return (self.folder / name).exists()

    def take(self, name: str) -> Any:
        """The value under a name; it stays there."""
        return pickle.loads((self.folder / name).read_bytes())  # noqa: S301 - the folder is private to our processes

    def remove(self, *names: str) -> None:
        """Remove values."""
        for name in names:
            (self.folder / name).unlink()

    def wait(self, names: Sequence[str], limit: float = math.inf, over: Callable[[], bool] = bool) -> list[Any] | None:
        """The values under all the names, as soon as they are there.

        Args:
            names: Of the values.
            limit: Seconds to wait.
            over: Asked at each look: whether none of them will come any more.

        Returns:
            None where they did not come.
        """
        for _ in polls(limit):
            lost = over()  # asked first: what was left before the end counts
            if all(map(self.has, names)):
                return [self.take(name) for name in names]
            if lost:
                return None
        return None

    def coming(self, name: str) -> Any:
        """The value under a name, however long it takes to come: a child waits so for its parent, which ends it."""
        while not self.has(name):
            time.sleep(PAUSE)
        return self.take(name)

    def raised(self, who: object, error: BaseException) -> None:
        """Tell the parent that this process raised: text and traceback, under ``raised-`` and a name for the process."""
        self.put(f"raised-{who}", (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))))

    def errors(self) -> list[tuple[str, str, str]]:
        """Who raised, what, and the traceback; the first one first."""
        paths = sorted(self.folder.glob("raised-*"), key=lambda path: path.stat().st_mtime_ns)
        return [(path.name.removeprefix("raised-"), *self.take(path.name)) for path in paths]


def polls(seconds: float) -> Iterator[None]:
    """One item a look, for so many seconds, with pauses between them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(PAUSE)


def main(words: Sequence[str]) -> object:
    """Call a function, as `calling` writes it down. Every child that runs a function of ours begins here."""
    parent, function, *arguments = words
    end_with_parent(None if parent == "-" else int(parent))
    module, _, name = function.partition(":")
    sys.argv[:] = [module, *arguments]
    return getattr(importlib.import_module(module), name)(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # type: ignore[arg-type]  # as `sys.exit` takes it: None, a number or a text
