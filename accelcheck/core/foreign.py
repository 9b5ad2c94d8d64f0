"""Calls code of other packages in pytest's process, with time limits and errors that name the place. No torch.

After the time limit an alarm raises in Python code. Native code that holds the interpreter cannot be interrupted: then
the process prints its stacks and ends. Cases need none of this: their own process is killed when it takes too long.
"""

import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from accelcheck.core.errors import InputError
from accelcheck.core.plain import text

SECONDS = 60.0
"""Default time limit of a call, in seconds."""
HELD = 10.0
"""Seconds after the alarm until a process ends whose interpreter is held."""
_REPEATED = 1.0
"""Seconds between two alarms: code that catches everything may catch the first."""
LINES = 12
"""Number of last lines of a traceback that an error quotes."""
_STDERR: list[int] = []


class ForeignCodeError(InputError):
    """Code of another package raised, did not return in time, or gave a wrong result."""

    late = False
    """True when it did not return in time."""


class _LateError(BaseException):
    """Raised by the alarm; no `Exception`, which the code may catch."""


def keep_stderr() -> None:
    """Keeps the present standard error: pytest captures it later, and the last words of the process would be lost."""
    if not _STDERR:
        with suppress(OSError):
            _STDERR.append(os.dup(2))


def stderr() -> int:
    """Descriptor of the standard error that `keep_stderr` kept, or of the present one."""
    return (*_STDERR, 2)[0]


@contextmanager
def calling(what: str, seconds: float = 0.0) -> Iterator[None]:
    """A context for calls of another package's code; raises `ForeignCodeError` where that raises or takes too long.

    Args:
        what: Package, class and method, for the error.
        seconds: Time limit in seconds; 0 for none. Ignored outside of the main thread and while another alarm is set.
    """
    try:
        with _bounded(seconds):
            yield
    except (KeyboardInterrupt, ForeignCodeError):
        raise
    except _LateError as error:
        ended = ForeignCodeError(f"{what} did not return within {seconds:g} s\n{_shown(error)}")
        ended.late = True
        raise ended from error
    except BaseException as error:  # an exit or a skip too: it would end the run without a word
        raise ForeignCodeError(f"{what} raised {type(error).__name__}: {text(error)}\n{_shown(error)}") from error


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    usable = threading.current_thread() is threading.main_thread() and not signal.getitimer(signal.ITIMER_REAL)[0]
    if not seconds or not usable:
        yield
        return

    def late(*_: object) -> NoReturn:
        raise _LateError

    before = signal.signal(signal.SIGALRM, late)
    faulthandler.dump_traceback_later(seconds + HELD, exit=True, file=stderr())
    signal.setitimer(signal.ITIMER_REAL, seconds, _REPEATED)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _shown(error: BaseException) -> str:
    """The last lines of the traceback, without the frames of this module."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if frame.filename not in {__file__, _CONTEXTS}]
    return "\n".join("".join(traceback.format_list(others)).splitlines()[-LINES:])


_CONTEXTS = contextmanager.__code__.co_filename
