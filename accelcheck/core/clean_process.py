"""A clean process: a fork that is made before anything here could change how this process computes. No torch.

What judges others must not compute where they ran: one that patches a function, or leaves a global mode switched, would change
its own reference. A fork knows all objects that existed before it, so that closures and local classes can be sent there by
reference; a new interpreter would have to find the same plugins again.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from accelcheck.core.processes import End, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

TAIL = 16384
"""Last bytes of its output that an error quotes."""

Begin: TypeAlias = "tuple[Callable[[], object], float]"


class CleanProcessError(RuntimeError):
    """The clean process died, or cannot be sent something; the message says which function it ran."""


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
        for begin, seconds in begins:
            self._pid, self._pipe = self._fork(begin)
            with suppress(EOFError):
                if self._pipe.poll(seconds) and self._pipe.recv_bytes() == _READY:
                    return
            self._kill()
        raise CleanProcessError(f"a fork of this process does not begin within {seconds:g} s{self._printed()}")

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function there; an exception that it raises is raised here too.

        Raises:
            CleanProcessError: The process died during the call, or function, arguments or result cannot be sent.
        """
        self._call += 1
        try:
            self._pipe.send_bytes(_dumped(self._names, (self._call, function, arguments)))
            call, raised, value = 0, True, (None, "")  # type: tuple[int, bool, Any]
            while call < self._call:  # the answer to a call that was interrupted here
                message = self._pipe.recv_bytes()
                if message != _READY:  # of a fork that took the place of one that died
                    call, raised, value = pickle.loads(message)  # noqa: S301 - from our own fork
        except (EOFError, OSError) as error:
            raise CleanProcessError(f"the clean process is gone{self._printed()}") from error
        if isinstance(value, End):
            raise CleanProcessError(f"a clean process that ran {_named(function)} {value}{self._printed()}")
        if raised:
            raised_there, trace = value
            raise raised_there from RemoteError(trace)
        return value

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

    def _printed(self) -> str:
        size = os.fstat(self._output).st_size
        text = os.pread(self._output, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
        return f"; it printed:\n{text}" if text else ""

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


_READY = b"ready"


# In the fork, which only forks, so that it stays as it was, and in the forks of it, which compute.


def _keep(
    parent: int, ours: Connection, pipe: Connection, output: int, known: Sequence[object], begin: Callable[[], object]
) -> NoReturn:
    """Fork until a fork ends by itself, which it does when nobody is left to call."""
    status = 1
    try:
        ours.close()
        end_with_parent(parent)
        with suppress(PermissionError):
            os.setpgid(0, 0)  # so that an interrupt from the keyboard does not come here
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)  # a worker's standard streams are its channel to the controller
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        faulthandler.enable(2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while True:
            pid = os.fork()
            if pid == 0:
                _compute(os.getppid(), pipe, known, begin)
            _, how = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(how)
            if code in {_OVER, _NOT_BEGUN}:
                status = 0
                break
            pipe.send_bytes(pickle.dumps((_LAST, True, End(code))))
    finally:
        os._exit(status)


_LAST = 2**62
"""Number of a call later than all: whichever runs when the process dies."""
_OVER, _NOT_BEGUN = 96, 97
"""Exit status where nobody is left to call, and where `begin` raised; 0 and 1 may be those of what was called."""


def _compute(parent: int, pipe: Connection, known: Sequence[object], begin: Callable[[], object]) -> NoReturn:
    status = _NOT_BEGUN
    try:
        end_with_parent(parent)
        begin()
        pipe.send_bytes(_READY)
        status = _OVER
        while True:
            message = pipe.recv_bytes()
            pipe.send_bytes(_answer(message, known))
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:  # noqa: BLE001 - of `begin`: it is printed, and the parent told by the status
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(message: bytes, known: Sequence[object]) -> bytes:
    call, trace, outcome = 0, "", None
    try:
        call, function, arguments = _loaded(known, message)
        return pickle.dumps((call, False, function(*arguments)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again where the call came from
        trace, outcome = "".join(traceback.format_exception(error)), error
    try:
        content = pickle.dumps((call or _LAST, True, (outcome, trace)))
        pickle.loads(content)  # noqa: S301 - our own: exceptions may not be made again from their arguments
    except Exception:  # noqa: BLE001 - as above
        plain = CleanProcessError(f"{type(outcome).__name__}: {outcome}")
        content = pickle.dumps((call or _LAST, True, (plain, trace)))
    return content


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
        _Pickler(file, names).dump(message)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CleanProcessError(
            f"{_named(message[1])}: cannot be sent to the clean process: {error}; register what it names before the first case"
            " runs, or define its classes and functions at the top of a module"
        ) from error
    return file.getvalue()


def _loaded(known: Sequence[object], message: bytes) -> tuple[int, Callable[..., Any], tuple[Any, ...]]:
    call, function, arguments = _Unpickler(io.BytesIO(message), known).load()
    return call, function, arguments


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
