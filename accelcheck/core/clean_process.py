"""A clean process: a fork that is made before anything here could change how this process computes. No torch.

What judges others must not compute where they ran: one that patches a function, or leaves a global mode switched, would change
its own reference. A fork knows all objects that existed before it, so that closures and local classes can be sent there by
reference; a new interpreter would have to find the same plugins again.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from accelcheck.core.processes import End, adopt_orphans, end_with_parent, kill_tree, polls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

TAIL = 16384
"""Last bytes of its output that an error quotes."""

Begin: TypeAlias = "tuple[Callable[[], object], float]"


class CleanProcessError(RuntimeError):
    """The clean process died, or cannot be sent something; the message says which function it ran.

    Attributes:
        end: How the process that ran the function ended; None where none did.
        printed: The last that it printed.
    """

    def __init__(self, message: str, end: End | None = None, printed: str = "") -> None:
        super().__init__(message)
        self.end = end
        self.printed = printed


class RemoteError(Exception):
    """The traceback of an exception in the clean process; the exception that is raised here has it as its cause."""


class CleanProcess:
    """Calls functions in a fork of this process. A fork of the fork computes; when it dies, the next one takes its place.

    Args:
        known: Objects that are sent by reference: they need not be picklable, and must not change from now on.
        begins: Functions that prepare the fork, best first, and the seconds that each may take: what needs threads of a library
            that do not survive a fork hangs. The first that returns is kept.

    Raises:
        CleanProcessError: None of `begins` returned.
    """

    def __init__(self, known: Iterable[object], begins: Sequence[Begin] = ((bool, 60.0),)) -> None:
        self._known = list(known)
        self._names = {id(one): number for number, one in enumerate(self._known)}
        self._call = 0
        self._parent = os.getpid()
        self._output = os.memfd_create("accelcheck-clean-process")
        fcntl.fcntl(
            self._output, fcntl.F_SETFL, os.O_APPEND
        )  # so that what is written after it is truncated begins at 0
        self.pid = 0
        """The process that computes; 0 while there is none."""
        for begin, seconds in begins:
            self._pid, self._pipe = self._fork(begin)
            with suppress(EOFError):
                if self._pipe.poll(seconds) and self._received()[0] == _READY:
                    return
            self._kill()
        printed = _quoted(self.printed())
        os.close(self._output)
        raise CleanProcessError(f"a fork of this process does not begin within {seconds:g} s{printed}")

    def call(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
        """The result of a function there; an exception that it raises is raised here too.

        Args:
            function: Runs in the process that computes.
            *arguments: Of the function.
            limit: Seconds after which that process, and what it has started, is killed.

        Raises:
            CleanProcessError: The process died during the call, or function, arguments or result cannot be sent.
        """
        self._call += 1
        os.ftruncate(self._output, 0)  # it would grow for as long as the run
        killed, begun, value, raised = None, False, None, True  # type: float | None, bool, Any, bool
        try:
            self._pipe.send_bytes(_dumped(self._names, (self._call, function, arguments)))
            while True:
                if begun and limit is not None and killed is None and not self._pipe.poll(limit):
                    killed = limit
                    self._stacks()
                    self.renew()
                what, number, *rest = self._received()
                if number == self._call and what == _BEGUN:
                    begun = True
                elif number == self._call and what == _ANSWER:
                    raised, value = rest
                    break
                elif begun and what == _END:
                    end = End(number, killed)
                    printed = self.printed()
                    message = f"a clean process that ran {_named(function)} {end}{_quoted(printed)}"
                    raise CleanProcessError(message, end, printed)
                # Anything else is about a call that was interrupted here, or a fork that has just begun.
        except (EOFError, OSError) as error:
            self.pid = 0
            raise CleanProcessError(f"the clean process is gone{_quoted(self.printed())}") from error
        if raised:
            raised_there, trace = value
            raise raised_there from RemoteError(trace)
        return value

    def renew(self) -> None:
        """Kill the process that computes, and what it has started; the next call finds another one."""
        if self.pid:
            kill_tree(self.pid)

    def printed(self) -> str:
        """What it has printed since the last call began: at most the last `TAIL` bytes."""
        size = os.fstat(self._output).st_size
        return os.pread(self._output, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()

    def _received(self) -> tuple[Any, ...]:
        message: tuple[Any, ...] = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 - from our own fork
        if message[0] == _READY:
            self.pid = message[1]
        elif message[0] == _END:
            self.pid = 0
        return message

    def _stacks(self) -> None:
        """Have the process that computes print the stacks of its threads; a handler in C does, whoever holds the GIL."""
        size = os.fstat(self._output).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACKS)
        for _ in polls(STACKS_PATIENCE):
            if os.fstat(self._output).st_size != size:
                time.sleep(STACKS_PATIENCE / 10)  # it is being written
                return

    def close(self) -> None:
        """End it. Only the process that made it can; in forks of that one, and a second time, nothing happens."""
        if self._parent != os.getpid() or self._pipe.closed:
            return
        self._kill()
        os.close(self._output)

    def _kill(self) -> None:
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _fork(self, begin: Callable[[], object]) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those that compute are tried by `begin`
            pid = os.fork()
        if pid == 0:
            _keep(os.getppid(), ours, theirs, self._output, self._known, begin)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here as well as there: whoever comes first
        theirs.close()
        return pid, ours


_READY, _BEGUN, _ANSWER, _END = "ready", "begun", "answer", "end"
"""What a message is: that a fork is there (its process), that it begins a call (number), what came out (number, whether it raised, the
result), or how the fork ended (exit status)."""
STACKS = signal.SIGUSR1
"""Has a fork print its stacks."""
STACKS_PATIENCE = 2.0
"""Seconds to wait for them."""


# In the fork, which only forks, so that it stays as it was, and in the forks of it, which compute.


def _keep(
    parent: int, ours: Connection, pipe: Connection, output: int, known: Sequence[object], begin: Callable[[], object]
) -> NoReturn:
    """Fork until a fork ends by itself, which it does when nobody is left to call."""
    status = 1
    try:
        ours.close()
        end_with_parent(parent)
        adopt_orphans()
        with suppress(PermissionError):
            os.setpgid(0, 0)  # so that an interrupt from the keyboard does not come here
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)  # a worker's standard streams are its channel to the controller
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        faulthandler.enable(2)
        faulthandler.register(STACKS, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            pid = os.fork()
            if pid == 0:
                _compute(os.getppid(), pipe, known, begin)
            code = _ended(pid)
            if code in {_OVER, _NOT_BEGUN}:
                status = 0
                break
            pipe.send_bytes(pickle.dumps((_END, code)))
    finally:
        os._exit(status)


def _ended(pid: int) -> int:
    """Wait until a fork has ended, and end what it has left behind."""
    while (found := os.waitpid(-1, 0))[0] != pid:
        pass  # of what a fork had started: on Linux it comes here when it loses its parent
    kill_tree(os.getpid(), itself=False)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return os.waitstatus_to_exitcode(found[1])


_OVER, _NOT_BEGUN = 96, 97
"""Exit status where nobody is left to call, and where `begin` raised; 0 and 1 may be those of what was called."""


def _compute(parent: int, pipe: Connection, known: Sequence[object], begin: Callable[[], object]) -> NoReturn:
    status = _NOT_BEGUN
    try:
        end_with_parent(parent)
        begin()
        pipe.send_bytes(pickle.dumps((_READY, os.getpid())))
        status = _OVER
        while True:
            _answer(pipe, pipe.recv_bytes(), known)
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:  # noqa: BLE001 - of `begin`: it is printed, and the parent told by the status
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(pipe: Connection, message: bytes, known: Sequence[object]) -> None:
    call, content = pickle.loads(message)  # noqa: S301 - from our own parent
    pipe.send_bytes(pickle.dumps((_BEGUN, call)))
    trace, outcome = "", None  # type: str, BaseException | None
    try:
        function, arguments = _Unpickler(io.BytesIO(content), known).load()
        answer = pickle.dumps((_ANSWER, call, False, function(*arguments)))
    except BaseException as error:  # noqa: BLE001 - raised again where the call came from: `pytest.skip` is no `Exception`
        trace, outcome = "".join(traceback.format_exception(error)), error
    if outcome is not None:
        answer = _raised(call, outcome, trace)
    pipe.send_bytes(answer)


def _raised(call: int, outcome: BaseException, trace: str) -> bytes:
    try:
        answer = pickle.dumps((_ANSWER, call, True, (outcome, trace)))
        pickle.loads(answer)  # noqa: S301 - our own: exceptions may not be made again from their arguments
    except Exception:  # noqa: BLE001 - as above
        plain = CleanProcessError(f"{type(outcome).__name__}: {outcome}")
        answer = pickle.dumps((_ANSWER, call, True, (plain, trace)))
    return answer


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, names: dict[int, int]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> int | None:
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: Sequence[object]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: Any) -> object:
        return self._known[pid]


def _dumped(names: dict[int, int], message: tuple[int, Callable[..., Any], tuple[Any, ...]]) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, names).dump(message[1:])
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CleanProcessError(
            f"{_named(message[1])}: cannot be sent to the clean process: {error}; register what it names before the first case"
            " runs, or define its classes and functions at the top of a module"
        ) from error
    return pickle.dumps((message[0], file.getvalue()))


def _quoted(printed: str) -> str:
    return f"; it printed:\n{printed}" if printed else ""


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
