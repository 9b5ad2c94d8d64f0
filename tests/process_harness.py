"""Processes that tests start: which of them still run.

It has no tests of its own.
"""

from __future__ import annotations

from pathlib import Path

from accelcheck.core.processes import polls


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left(*pids: int, seconds: float = 5.0) -> list[int]:
    """Which of the processes still run after that time at most."""
    for _ in polls(seconds):
        if not any(map(alive, pids)):
            break
    return [pid for pid in pids if alive(pid)]
