"""Runs another program in place of this one: it gets the terminal and this process's signals. No torch."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from accelcheck.core.forking import end_threads
from accelcheck.core.processes import end_with_parent

INTERVAL = 0.5
"""Seconds between two calls of `meanwhile`."""
_HANDED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_SI_KERNEL = 0x80  # from <siginfo.h>: a key of the terminal, which reaches the whole process group


def run(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    meanwhile: Callable[[], bool] | None = None,
) -> int:
    """Runs a program until it ends, in this process group and with these standard streams.

    SIGINT, SIGTERM and SIGHUP that this process gets are handed on, except for those of the terminal's keys, which
    reach the program anyway. The program is killed when this process is. The exit status is 128 plus the number of the
    signal that ended it.

    Args:
        command: The program and its arguments.
        environ: Variables besides those of this process.
        output: File that takes the place of its standard output and error.
        meanwhile: Function called every `INTERVAL` seconds; once it returns True, the program is interrupted.
    """
    parent = os.getpid()
    waited = {*_HANDED_ON, signal.SIGCHLD}
    end_threads()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)  # `sigwaitinfo` takes them

    def begin() -> None:
        if meanwhile is not None:  # a shell ignores SIGINT in its background jobs, and the program would inherit that
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(parent)

    try:
        with subprocess.Popen(  # noqa: S603 - the command that the user asked for
            command,
            env={**os.environ, **(environ or {})},
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=begin,  # noqa: PLW1509 - no other thread runs
        ) as child:
            while child.poll() is None:
                received = signal.sigwaitinfo(waited) if meanwhile is None else signal.sigtimedwait(waited, INTERVAL)
                if meanwhile is not None and meanwhile():
                    meanwhile = None
                    child.send_signal(signal.SIGINT)
                if received is None or received.si_signo not in _HANDED_ON or received.si_code == _SI_KERNEL:
                    continue
                if child.poll() is None:
                    child.send_signal(received.si_signo)
            code = child.returncode
    finally:
        while signal.sigtimedwait(_HANDED_ON, 0) is not None:
            pass  # a late one was meant for the program
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return code if code >= 0 else 128 - code
