"""Reads the native stacks of a process that hangs, by a debugger, where one is installed and permitted. No torch.

Python's own stacks end where native code begins: they show that a kernel was launched, but not what it waits for.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from accelcheck.core.plain import text

SECONDS = 20.0
"""Time limit of a debugger, in seconds: it reads the symbols of all libraries of the process."""
FRAMES = 40
"""Most frames of a thread."""
MOST_TEXT = 8000
"""Longest text of the stacks, in characters."""
PROGRAMS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "py-spy": ("dump", "--native", "--pid"),
        "eu-stack": ("-n", str(FRAMES), "-p"),
        "gdb": (
            *("-nx", "-batch", "-ex", "set print frame-arguments none", "-ex", f"thread apply all backtrace {FRAMES}"),
            "-p",
        ),
    }
)
"""Debuggers, the best first, and their arguments before the number of the process."""


def native_stacks(pid: int, seconds: float = SECONDS) -> str:
    """The stacks of all threads of a process, which is stopped meanwhile, by a debugger within so many seconds.

    They are empty where no debugger is installed, or none is permitted.
    """
    for name, arguments in PROGRAMS.items():
        program = shutil.which(name)
        frames = [] if program is None else _frames([program, *arguments, str(pid)], seconds)
        if frames:
            return f"Native stacks, by {name}:\n{text(os.linesep.join(frames), MOST_TEXT)}"
    return ""


def _frames(command: Sequence[str], seconds: float) -> list[str]:
    """The lines of threads and frames that a debugger prints; none where it fails or takes too long."""
    environ = {**os.environ, "DEBUGINFOD_URLS": "", "LC_ALL": "C"}  # without downloads
    try:
        child = subprocess.Popen(  # noqa: S603 - a debugger from PATH, and a number
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:
        return []
    try:
        printed, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return []
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)  # its children may hold the pipe
    lines = [line.rstrip() for line in printed.splitlines()]
    # py-spy indents its frames, the others number them; a debugger without permission prints why, and no frame.
    kept = [line for line in lines if line.startswith(("#", "Thread", "TID", "    "))]
    return kept if any(line.startswith(("#", "    ")) for line in kept) else []
