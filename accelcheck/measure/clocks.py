"""Times blocks of calls: long enough for the clock, after warm-up, without garbage collection."""

import contextlib
import ctypes
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from accelcheck.devices.base import Device

BLOCK = 1e-3
"""Least duration of a block in seconds: a thousand times the cost of reading a clock, and its resolution."""
MOST_CALLS = 1 << 16
"""Most calls of a block; reached by calls that do nothing."""
GROWTH = 100
"""Largest factor between the numbers of calls of two tries, since a time of 0 does not tell how many fit."""
WINDOW = 5
"""Number of blocks whose median is compared with that of as many before."""
SETTLED = 0.02
"""Largest share by which a window of settled times is faster than the one before."""
PATIENCE = 2.0
"""Time limit of warm-up in seconds; a running block is finished."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of <malloc.h>


class ClockError(RuntimeError):
    """A clock stood still or went backwards, so there is no time."""


def block(device: Device, call: Callable[[], object]) -> Callable[[], float]:
    """A function that runs calls for `BLOCK`: seconds per call, or a `ClockError` where they are not positive."""
    times = 1
    # The shorter of two: the very first call may take many times as long as the following ones.
    while (spent := min(device.elapsed(call, times) for _ in range(2))) < BLOCK and times < MOST_CALLS:
        times = min(MOST_CALLS, max(2 * times, math.ceil(times * BLOCK / max(spent, BLOCK / GROWTH))))

    return lambda: positive(device.elapsed(call, times), device, times) / times


def positive(seconds: float, device: Device, times: int) -> float:
    """The seconds that this number of calls took; a `ClockError` where they are not positive and finite."""
    if not (seconds > 0.0 and math.isfinite(seconds)):
        raise ClockError(f"{device.name}: expected {times} calls to take a positive time, the clock says {seconds} s")
    return seconds


def settle(timed: Callable[[], float], now: Callable[[], float] = time.perf_counter, patience: float = PATIENCE) -> int:
    """Measure until times no longer fall: caches are warm, clock rates are up, code is compiled. Keeps freed memory.

    Returns:
        Number of blocks. If `patience` seconds ended the warm-up, times may still have been falling.
    """
    keep_freed_memory()
    start, seen = now(), [timed()]
    while now() - start < patience:
        seen.append(timed())
        if len(seen) >= 2 * WINDOW and len(seen) % WINDOW == 0:
            before, after = statistics.median(seen[-2 * WINDOW : -WINDOW]), statistics.median(seen[-WINDOW:])
            if after > before * (1 - SETTLED):
                break
    return len(seen)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Disable garbage collection, after collecting once."""
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
    """Make glibc's allocator keep freed memory in this process. Has no effect with other C libraries.

    Otherwise some processes get every large result on fresh pages, which fault: of 36 processes that ran 20
    element-wise operations on 2 MiB, five took 1.2 to 3.3 times as long as the others, which spread by 2 %. With this,
    none of 24 did (docs/findings.md has the page faults of such processes).
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        # Not by M_MMAP_THRESHOLD: older releases refuse more than 32 MiB, and keep their own threshold.
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
