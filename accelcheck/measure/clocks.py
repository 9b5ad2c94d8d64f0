"""Times of blocks of calls: long enough for the clock, after warming up, undisturbed by the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import statistics
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelcheck.devices.base import Device

BLOCK = 1e-3
"""Seconds that a block of calls takes at least: a thousand times what a clock's reading and its resolution cost."""
MOST_CALLS = 1 << 16
"""Calls of a block at most: of what does nothing."""
GROWTH = 100
"""Times as many calls at most from one try of a block to the next: a clock that says 0 once says nothing of how many fit."""
WINDOW = 5
"""Blocks whose median is compared with that of as many before, to see whether times have settled."""
SETTLED = 0.02
"""A window that is faster than the one before it by less than this part is steady."""
PATIENCE = 2.0
"""Seconds of warming up at most."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of <malloc.h>


class ClockError(RuntimeError):
    """A clock stood still or went backwards: there is no figure."""


def block(device: Device, call: Callable[[], object]) -> Callable[[], float]:
    """What runs as many calls as take `BLOCK`, and gives the seconds of one of them.

    Raises:
        ClockError: Raised by what is returned, when a time is not positive.
    """
    times = 1
    # The shorter of two: the first call of all may be many times as long as those that follow.
    while (spent := min(device.elapsed(call, times) for _ in range(2))) < BLOCK and times < MOST_CALLS:
        times = min(MOST_CALLS, max(2 * times, math.ceil(times * BLOCK / max(spent, BLOCK / GROWTH))))

    return lambda: positive(device.elapsed(call, times), device, times) / times


def positive(seconds: float, device: Device, times: int) -> float:
    """The seconds that so many calls took.

    Raises:
        ClockError: They are not positive.
    """
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise ClockError(f"{device.name}: expected {times} calls to take a positive time, the clock says {seconds} s")
    return seconds


def settle(timed: Callable[[], float], now: Callable[[], float] = time.perf_counter) -> int:
    """Measure until times no longer fall: caches are warm, clocks are up, code is compiled. Freed memory stays with the process.

    Returns:
        Number of blocks that it took. Where `PATIENCE` ended it, the last ones may still have fallen.
    """
    keep_freed_memory()
    start, seen = now(), [timed() for _ in range(WINDOW)]
    while now() - start < PATIENCE:
        seen += [timed() for _ in range(WINDOW)]
        before, after = statistics.median(seen[-2 * WINDOW : -WINDOW]), statistics.median(seen[-WINDOW:])
        if after > before * (1 - SETTLED):
            break
    return len(seen)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Without garbage collection: what there is is collected before, and nothing during."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@functools.cache
def keep_freed_memory() -> None:
    """From now on this process gives no memory back to the kernel, where its allocator is glibc's.

    Otherwise chance decides, for as long as the process lives, whether every large result comes from fresh pages, which fault: of 36
    processes that ran 20 element-wise operations on 2 MiB, five took 1.2 to 3.3 times as long as the others, which spread by 2 %.
    With this, none of 24 did (docs/findings.md has the page faults of such processes).
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        # Not by M_MMAP_THRESHOLD: older releases refuse one of more than 32 MiB, and then keep the one that they have.
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
