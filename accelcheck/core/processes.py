"""Starts, watches and ends child processes, and exchanges messages with them. No torch.

A child prints to a file, because a pipe stays open as long as any process that the child started. It reports by
messages: JSON lines that `say` appends to a second file. Python values, such as tensors, go through a `Mailbox`, whose
files hold pickles. execnet does not fit: its gateway threads would disturb a process that measures, torchrun starts its
ranks itself, and a gateway that a backend crashes loses the backend's last output.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from accelcheck.core.case import Verdict
from accelcheck.core.files import SCRATCH, replacing, scratch

LINES = 25
"""Number of last lines of output that an error quotes."""
GRACE = 5.0
"""Seconds that a process has to end after SIGTERM."""
PAUSE = 0.01
"""Seconds between two looks at a mailbox."""

_MESSAGES = "ACCELCHECK_MESSAGES"
"""Environment variable of a child and its children with the file that `say` appends to."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER = 1, 36, 0x59616D61  # from <linux/prctl.h>

Message = dict[str, Any]


class ChildError(RuntimeError):
    """A child process ended, raised or was silent for too long; the message quotes its last output."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a child.

    Attributes:
        code: Exit status; the negative number of the signal that killed it.
        limit: Seconds, of its silence where `silent`, after which it was killed; None where it ended by itself.
    """

    code: int
    limit: float | None = None
    silent: bool = False

    @property
    def verdict(self) -> Verdict:
        """Verdict of the case during which it ended."""
        return Verdict.CRASH if self.limit is None else Verdict.HANG

    @property
    def how(self) -> str:
        """Status or signal of a child that ended by itself, such as ``status 3`` or ``SIGSEGV``; else empty."""
        if self.limit is not None:
            return ""
        if self.code >= 0:
            return f"status {self.code}"
        names = {number.value: number.name for number in signal.Signals}
        return names.get(-self.code, f"signal {-self.code}")  # real-time signals have no names

    def __str__(self) -> str:
        if self.limit is not None:
            what = "was silent for" if self.silent else "ran for longer than"
            return f"{what} {self.limit:g} s and was killed"
        return f"ended with {self.how}" if self.code >= 0 else f"died of {self.how}"


def calling(function: str, *arguments: object, parent: bool = False) -> list[str]:
    """Arguments of an interpreter that calls ``package.module:name`` with a list of texts, and dies with its parent.

    The function's result, unless it is None, is the exit status. `parent` is True when this process starts the
    interpreter; otherwise a child of it does, such as torchrun.
    """
    return ["-m", __name__, str(os.getpid()) if parent else "-", function, *map(str, arguments)]


class Child:
    """A running Python program; a context, which ends the program and its children.

    Start it in a thread that lives as long as the child: the kernel kills a child of `calling` with that thread. An
    `OSError` where the interpreter cannot be started.

    Args:
        arguments: Arguments of the interpreter; `calling` makes them for a function.
        environ: Variables besides those of this process.
        python: The interpreter; by default this one, with the import path of this process.
        cwd: Working directory; by default that of this process.
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
        # Safe path: `-m` would put the working folder, which may hold a `torch` or a `queue.py`, before all of these.
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
        return self._process.pid

    @property
    def running(self) -> bool:
        """True when the program runs, or is stopped."""
        return self._process.returncode is None and self._state(os.WEXITED | os.WNOHANG) is None

    def wait(
        self, limit: float | None = None, *, since: float | None = None, silence: bool = False, turns: bool = False
    ) -> End | None:
        """Waits until the child ends, without polls, which would take time from the cores that it measures.

        Args:
            limit: Seconds after which the child and its children are killed.
            since: Reading of `time.monotonic` from which the limit counts; by default it counts from now.
            silence: True to restart the limit at each message; a silent child is then killed within twice the limit.
            turns: True to return None when the child has stopped itself (`stop`).
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
        """Lets a child run on that has stopped itself."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Sends a signal to the program alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def output(self) -> str:
        """The whole output of the program and its children."""
        return self._output.read_text(errors="replace")

    def last(self, lines: int = LINES) -> str:
        """The last lines of the output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def messages(self) -> list[Message]:
        """The messages until now, without a line that a crash cut short."""
        messages: list[Message] = []
        for line in self._messages.read_text(errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                message = json.loads(line)
                messages += [message] if isinstance(message, dict) else []
        return messages

    def end(self, grace: float = 0.0) -> None:
        """Ends the program and its children, after `grace` seconds from a SIGTERM on, and removes their files."""
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
        # The process stays a zombie until `end`: its number, which is also its group's, is not used again.
        return os.waitid(os.P_PID, self.pid, options | os.WNOWAIT)

    def _watch(self, limit: float | None, passed: float, over: threading.Event, silence: bool) -> None:  # noqa: FBT001
        pause = None if limit is None else max(0.0, limit - passed)
        before = self._messages.stat().st_size
        while not over.wait(pause):
            size = self._messages.stat().st_size
            if not silence or size == before:
                if self.running:
                    self._killed = limit, silence
                    self._kill(self._tree())
                return
            before, pause = size, limit

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
            os.killpg(self.pid, signal.SIGKILL)  # also orphans, which are in no tree


def _psutil() -> Any:
    # Late: its import takes longer than the rest of the plugin's start.
    import psutil  # type: ignore[import-untyped]  # it comes without annotations

    return psutil


# In the child.


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Has the Linux kernel send a signal to this process when its parent ends; does nothing elsewhere.

    A process that is stopped, or is measuring, would not notice, and would disturb the next measurement. A parent whose
    number is given may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_at_once() -> None:
    """Ends this process without tearing backends down, which may crash or hang at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def adopt_orphans() -> None:
    """Makes this process the new parent of its orphaned descendants, on Linux; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def let_trace(pid: int) -> None:
    """Permits debuggers of the process `pid` to trace this one, where Linux permits descendants only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid, 0, 0, 0)


def kill_tree(pid: int, *, itself: bool = True) -> None:
    """Kills a process, unless `itself` is False, and its descendants, except for orphans."""
    psutil = _psutil()
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), *([process] if itself else [])]:
            with suppress(psutil.Error):
                member.kill()


def say(**message: Any) -> None:
    """Reports a message to the parent in one write; without a parent that listens, prints it."""
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
    """Stops all threads of this process until the parent lets them go on."""
    signal.raise_signal(signal.SIGSTOP)


# Python values, in both directions.


def _pickled(value: Any) -> bytes:
    """A pickle, with the code itself of lambdas and local classes, such as a user-owned loss."""
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps(value)  # not multiprocessing's: tensors would share memory that ends with a process
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}; define its classes and functions at the top of a module, "
            "without open files, locks and generators"
        ) from error
    return content


@dataclass(frozen=True)
class Mailbox:
    """A folder, which exists and is private to a run, through which our own processes exchange named values."""

    folder: Path

    def put(self, name: str, value: Any) -> None:
        """Writes a value, of which readers find all or nothing; raises `TypeError` for an open file or a lock, say."""
        content = _pickled(value)
        with replacing(self.folder / name, durable=False) as file:
            file.write(content)

    def has(self, name: str) -> bool:
        """True when there is a value under a name."""
        return (self.folder / name).exists()

    def take(self, name: str) -> Any:
        """The value under a name; it stays there."""
        return pickle.loads((self.folder / name).read_bytes())  # noqa: S301 - the folder is private to our processes

    def remove(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink()

    def wait(self, names: Sequence[str], limit: float = math.inf, over: Callable[[], bool] = bool) -> list[Any] | None:
        """The values under all the names, as soon as they are there; None after `limit` seconds, or once `over`."""
        for _ in polls(limit):
            lost = over()  # first, so that values written before the end count
            if all(map(self.has, names)):
                return [self.take(name) for name in names]
            if lost:
                return None
        return None

    def coming(self, name: str) -> Any:
        """The value under a name, however long it takes to come: a child waits for its parent, which would end it."""
        while not self.has(name):
            time.sleep(PAUSE)
        return self.take(name)

    def raised(self, who: object, error: BaseException) -> None:
        """Writes text and traceback of an exception under ``raised-`` and a name for this process."""
        self.put(f"raised-{who}", (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))))

    def errors(self) -> list[tuple[str, str, str]]:
        """Process name, text and traceback of each exception that was written with `raised`, the first one first."""
        paths = sorted(self.folder.glob("raised-*"), key=lambda path: path.stat().st_mtime_ns)
        return [(path.name.removeprefix("raised-"), *self.take(path.name)) for path in paths]


def polls(seconds: float) -> Iterator[None]:
    """Yields for so many seconds, with a pause of `PAUSE` between two yields."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(PAUSE)


def main(words: Sequence[str]) -> object:
    """Calls the function that `calling` named: the entry point of every child that runs a function of ours."""
    parent, function, *arguments = words
    end_with_parent(None if parent == "-" else int(parent))
    module, _, name = function.partition(":")
    sys.argv[:] = [module, *arguments]
    return getattr(importlib.import_module(module), name)(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))  # type: ignore[arg-type]  # `sys.exit` takes None, a number or a text
