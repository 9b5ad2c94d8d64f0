"""Notices workers that die while a process that they started holds their pipe: xdist waits for the end of the pipe alone. No torch.

On Linux, where the processes that hold a pipe can be told.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE = 1.0
"""Seconds that the end of the pipe has to come by itself."""


def watch(node: Any) -> None:
    """Wait for the end of a worker's process, in a thread, and then end whoever else writes to its pipe.

    Args:
        node: Of xdist. One that is no process of ours, on another machine say, is left alone.
    """
    process = getattr(getattr(node.gateway, "_io", None), "popen", None)
    if process is None or sys.platform != "linux":
        return
    try:
        pipe = os.fstat(process.stdout.fileno()).st_ino
    except (OSError, ValueError):
        return
    threading.Thread(target=_wait, args=(process, pipe), name="accelcheck-worker", daemon=True).start()


def _wait(process: Any, pipe: int) -> None:
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays there for its owner to wait for
    time.sleep(GRACE)
    if process.stdout.closed:  # it has come
        return
    for holder in _writers(pipe):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(holder, signal.SIGKILL)


def _writers(pipe: int) -> list[int]:
    """The processes that have a pipe open for writing, by the number of its inode."""
    found = []
    for process in (one for one in Path("/proc").glob("[0-9]*") if one.name != str(os.getpid())):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    named = str(descriptor.readlink()) == f"pipe:[{pipe}]"
                    # The mode of the link is that of the descriptor: ours reads.
                    if named and descriptor.lstat().st_mode & 0o200:
                        found.append(int(process.name))
                        break
    return found
