"""How long this process waited for a core while others had them: the kernel's own count."""

from __future__ import annotations

from pathlib import Path

_TASKS = Path("/proc/self/task")


def waited() -> float | None:
    """Seconds that the threads of this process were ready to run and did not, all together, since they began.

    Of threads that have ended nothing is left. None where the kernel does not say: elsewhere than on Linux, or without schedstats
    (https://docs.kernel.org/scheduler/sched-stats.html: the second number is nanoseconds spent waiting on a runqueue).
    """
    seconds, told = 0.0, False
    for path in _TASKS.glob("*/schedstat"):
        try:
            seconds += 1e-9 * int(path.read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        told = True
    return seconds if told else None
