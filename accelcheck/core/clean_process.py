"""A clean process: a fork made before any case could change how this process computes. No torch.

References are not computed where cases ran: a case that patches a function, or leaves a global mode switched, would
change its own reference. A fork knows all objects that existed before it, so that closures and local classes are sent
by reference; a new interpreter would have to find the same plugins again.
"""

import faulthandler
import fcntl
import gc
import io
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeAlias

from accelcheck.core.forking import end_threads, give_back
from accelcheck.core.native_stacks import native_stacks
from accelcheck.core.processes import End, adopt_orphans, end_with_parent, kill_tree, let_trace, polls

TAIL = 16384
"""Number of last bytes of its output that an error quotes."""

Begin: TypeAlias = "tuple[Callable[[], object], float]"


class CleanProcessError(RuntimeError):
    """The clean process died, or cannot be sent something; the message says which function it ran.

    Attributes:
        end: End of the process that ran the function; None where none ended.
        printed: Its last output.
    """

    def __init__(self, message: str, end: End | None = None, printed: str = "") -> None:
        super().__init__(message)
        self.end = end
        self.printed = printed


class RemoteError(Exception):
    """The traceback of an exception in the clean process: the cause of the exception that is raised here."""


class CleanProcess:
    """Calls functions in a fork of a fork of this process; when it dies, the next one takes its place.

    Args:
        known: Objects that are sent by reference: they need not be picklable, and must not change from now on.
        begins: Functions that prepare the fork, best first, and time limits in seconds: one that needs threads, which a
            fork lacks, hangs. The first that returns is kept.

    Attributes:
        begun: Placeholder, as an argument of a call, for the object that this function returned there.

    Raises:
        CleanProcessError: None of `begins` returned.
    """

    def __init__(self, known: Iterable[object], begins: Sequence[Begin] = ((bool, 60.0),)) -> None:
        self.begun: Any = object()
        self._known = [self.begun, *known]
        self._names = {id(value): number for number, value in enumerate(self._known)}
        self._call = 0
        self._native, self._late = "", 0
        self._state = mmap.mmap(-1, 16)  # shared with the forks: state of the one that computes, and the latest call
        self._parent = os.getpid()
        self._output = os.memfd_create("accelcheck-clean-process")
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # output after a truncation then begins at 0
        self.pid = 0
        """Process that computes; 0 while there is none."""
        for begin, seconds in begins:
            self._seconds = max(seconds, BEGIN_AGAIN)
            self._pid, self._pipe = self._fork(begin)
            with suppress(EOFError):
                if self._pipe.poll(seconds) and self._received()[0] == _READY:
                    return
            self._kill()
        printed = _quoted(self.printed())
        os.close(self._output)
        raise CleanProcessError(f"a fork of this process does not begin within {seconds:g} s{printed}")

    def call(self, function: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
        """The result of a function in the process that computes; its exception is raised here too.

        After `limit` seconds that process and its children are killed. A process that takes the place of another has
        further seconds to begin, at least `BEGIN_AGAIN`, and is replaced once where it does not. A `CleanProcessError`
        where the process died during the call, none begins, or the call cannot be sent.
        """
        self._call += 1
        if self._pipe.closed:
            raise CleanProcessError("the clean process is gone")
        os.ftruncate(self._output, 0)  # it would grow for as long as the run
        self._native, self._late = "", 0
        self._state[8:] = self._call.to_bytes(8, "little")
        try:
            self._pipe.send_bytes(_dumped(self._names, (self._call, function, arguments)))
            while self._first()[:2] != (_BEGUN, self._call):
                pass  # a message about a call that was interrupted here, or a fork that has just begun
            raised, value = self._outcome(_named(function), limit)
        except (EOFError, OSError) as error:
            self.pid = 0
            self._kill()
            raise CleanProcessError(f"the clean process is gone{_quoted(self.printed())}") from error
        if raised:
            raised_there, trace = value
            raise raised_there from RemoteError(trace)
        return value

    def _outcome(self, name: str, limit: float | None) -> tuple[bool, Any]:
        """True and the exception of a call that has begun, or False and its result; it ends after `limit` seconds."""
        killed = None
        while True:
            if limit is not None and killed is None and not self._pipe.poll(limit):
                killed = limit
                self._stacks()
                self.renew()
            kind, number, *rest = self._received()
            if (kind, number) == (_ANSWER, self._call):
                raised, value = rest
                return raised, value
            if kind == _END:
                end, printed = End(number, killed), self.printed()
                raise CleanProcessError(f"a clean process that ran {name} {end}{_quoted(printed)}", end, printed)

    @property
    def gone(self) -> bool:
        """True when no call is possible any more, because the process that makes forks has ended."""
        return self._pipe.closed

    def renew(self) -> None:
        """Kills the process that computes, and its children; the next call finds another one."""
        if self.pid:
            kill_tree(self.pid)

    def printed(self) -> str:
        """Output since the last call began, at most the last `TAIL` bytes, and native stacks of a killed process."""
        size = os.fstat(self._output).st_size
        output = os.pread(self._output, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
        return "\n\n".join(part for part in (output, self._native) if part)

    def _received(self) -> tuple[Any, ...]:
        message: tuple[Any, ...] = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 - from our own fork
        if message[0] == _READY:
            self.pid = message[1]
        elif message[0] == _END:
            self.pid = 0
        return message

    def _first(self) -> tuple[Any, ...]:
        """A message before a call begins; a fork that sends none is killed, and the next one takes the call."""
        if not self._pipe.poll(self._seconds):
            kill_tree(self._pid, itself=False)
            self._late += 1
            if self._late == ATTEMPTS:
                printed = _quoted(self.printed())
                raise CleanProcessError(f"the clean process does not begin within {self._seconds:g} s{printed}")
        return self._received()

    def _stacks(self) -> None:
        """Has the process that computes print the stacks of its threads, by a handler in C that needs no GIL."""
        size = os.fstat(self._output).st_size
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACKS)
        for _ in polls(STACKS_PATIENCE):
            if os.fstat(self._output).st_size != size:
                time.sleep(STACKS_PATIENCE / 10)  # it is being written
                break
        self._native = native_stacks(self.pid) if self.pid else ""

    def close(self) -> None:
        """Ends it. In forks of the process that made it, and a second time, nothing happens."""
        if self._parent != os.getpid() or self._output < 0:
            return
        self._kill()
        gc.unfreeze()
        os.close(self._output)
        self._output = -1

    def _kill(self) -> None:
        if self._pipe.closed:
            return
        self._pipe.close()
        kill_tree(self._pid)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _fork(self, begin: Callable[[], object]) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        end_threads()
        give_back()  # a free page that both share would be copied where either writes to it
        gc.freeze()  # later collections, in either process, then do not write to shared pages
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: `begin` tries if a fork computes
            pid = os.fork()
        if pid == 0:
            _keep(os.getppid(), ours, theirs, self._output, self._state, self._known, begin)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)  # here as well as in the fork: either may come first
        theirs.close()
        return pid, ours


_READY, _BEGUN, _ANSWER, _END = "ready", "begun", "answer", "end"
"""Kinds of messages: a fork is ready (its process), begins a call (number), answers it (number, True if it raised, the
result or exception), or has ended (exit status)."""
_BEGINS, _SERVES, _OVER = 0, 1, 2
"""States of the fork that computes: not yet ready, ready, ended because nobody is left to call. They are in shared
memory, since an exit status may be that of a case."""
BEGIN_AGAIN = 60.0
"""Least seconds that a fork which takes the place of another has to begin."""
ATTEMPTS = 2
"""Number of forks in a row that may fail to begin."""
STACKS = signal.SIGUSR1
"""Signal that has a fork print its stacks."""
ORPHANED = signal.SIGTERM
"""Signal to the process that forks when the calling process has ended."""
STACKS_PATIENCE = 2.0
"""Seconds to wait for the stacks."""


# In the fork, which only forks, so that it stays as it was, and in its forks, which compute.


def _keep(
    parent: int,
    ours: Connection,
    pipe: Connection,
    output: int,
    state: mmap.mmap,
    known: Sequence[object],
    begin: Callable[[], object],
) -> NoReturn:
    """Forks until a fork ends by itself, which it does when nobody is left to call."""
    status = 1
    try:
        ours.close()
        signal.signal(ORPHANED, _orphaned)
        end_with_parent(parent, ORPHANED)
        adopt_orphans()
        with suppress(PermissionError):
            os.setpgid(0, 0)  # so that an interrupt from the keyboard does not come here
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)  # a worker's standard streams are its channel to the controller
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        faulthandler.enable(2)
        faulthandler.register(STACKS, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        failed, served = 0, False
        while True:
            state[0] = _BEGINS
            keeper = os.getpid()
            pid = os.fork()
            if pid == 0:
                _compute(parent, keeper, pipe, state, known, begin)
            code = _ended(pid)
            if state[0] == _OVER:
                status = 0
                break
            served = served or state[0] == _SERVES
            failed = 0 if state[0] == _SERVES else failed + 1
            if failed == (ATTEMPTS if served else 1):  # the first one tells if forks of this process can begin at all
                break
            pipe.send_bytes(pickle.dumps((_END, code)))
    finally:
        os._exit(status)


def _ended(pid: int) -> int:
    """Waits until a fork has ended, ends its orphaned children, and returns the fork's exit status."""
    while (ended := os.waitpid(-1, 0))[0] != pid:
        pass  # an orphan of a fork, which this process adopts on Linux
    kill_tree(os.getpid(), itself=False)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return os.waitstatus_to_exitcode(ended[1])


def _orphaned(*_: object) -> NoReturn:
    """Ends all children when the calling process has ended: they would live on."""
    kill_tree(os.getpid(), itself=False)
    os._exit(0)


def _compute(
    caller: int, keeper: int, pipe: Connection, state: mmap.mmap, known: Sequence[object], begin: Callable[[], object]
) -> NoReturn:
    try:
        signal.signal(ORPHANED, signal.SIG_DFL)
        end_with_parent(keeper)
        let_trace(caller)
        os.setpgid(0, 0)  # a launcher that signals its own group at its end would end the process that forks
        known = [begin(), *known[1:]]
        state[0] = _SERVES
        pipe.send_bytes(pickle.dumps((_READY, os.getpid())))
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                state[0] = _OVER
                break
            _answer(pipe, message, int.from_bytes(state[8:], "little"), known)
    except BrokenPipeError:
        state[0] = _OVER
    except BaseException:  # noqa: BLE001 - `begin` raised: the parent quotes the traceback
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(pipe: Connection, message: bytes, latest: int, known: Sequence[object]) -> None:
    call, content = pickle.loads(message)  # noqa: S301 - from our own parent
    if call != latest:  # its caller was interrupted
        return
    pipe.send_bytes(pickle.dumps((_BEGUN, call)))
    try:
        function, arguments = _Unpickler(io.BytesIO(content), known).load()
        answer = pickle.dumps((_ANSWER, call, False, function(*arguments)))
    except BaseException as error:  # noqa: BLE001 - the caller raises it again: `pytest.skip` is no `Exception`
        answer = _raised(call, error, "".join(traceback.format_exception(error)))
    pipe.send_bytes(answer)


def _raised(call: int, outcome: BaseException, trace: str) -> bytes:
    try:
        answer = pickle.dumps((_ANSWER, call, True, (outcome, trace)))
        pickle.loads(answer)  # noqa: S301 - our own: some exceptions cannot be made again from their arguments
    except Exception:  # noqa: BLE001 - `__init__` of others may raise anything
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
            f"{_named(message[1])}: cannot be sent to the clean process: {error}; register what it names before the "
            "first case runs, or define its classes and functions at the top of a module"
        ) from error
    return pickle.dumps((message[0], file.getvalue()))


def _quoted(printed: str) -> str:
    return f"; it printed:\n{printed}" if printed else ""


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
