"""How long this process waited for a core, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

_TASKS = Path("/proc/self/task")


def waited() -> float | None:
    """Total seconds that the living threads of this process were ready to run and waited for a core.

    None where the kernel does not tell: on systems other than Linux, or without schedstats
    (https://docs.kernel.org/scheduler/sched-stats.html: the second number is nanoseconds spent waiting on a runqueue).
    """
    seconds, told = 0.0, False
    for path in _TASKS.glob("*/schedstat"):
        try:
            seconds += 1e-9 * int(path.read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
        told = True
    return seconds if told else None
