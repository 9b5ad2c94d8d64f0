"""Times kernels on a GPU's stream: with cold caches, and without the time that the host takes to launch them.

Before each call as much memory is written as evicts every cache. While the GPU writes, the host launches what is timed, so that the
kernels stand in the stream when the first one starts; otherwise the gaps between launches count as kernels. Triton's ``do_bench`` writes
256 MB for the caches alone (python/triton/testing.py). NVIDIA's nvbench holds the stream by a kernel that waits for the host until all is
launched, which deadlocks where a call waits for the device or loads a module (https://github.com/NVIDIA/nvbench/issues/240). Writing
more than once does the same without that danger.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

FLUSHED = 256 << 20
"""Least bytes to write before a call, as in Triton: twice the largest L2 (B200: 126 MB) and AMD's Infinity Cache (MI300X: 256 MB)."""
MARGIN = 2.0
"""The writes take this many times as long as the launch did in the block before: a host is seldom that much slower."""
WAITED = 0.75
"""A launch that takes a larger part of several writes waits for them. One that does not takes 1 / `MARGIN`."""
LONGEST = 1e-2
"""Most seconds of writes before a call. A launch that takes longer stays in the time, as it would in an application."""

_WRITES: WeakKeyDictionary[Callable[[], object], int] = WeakKeyDictionary()


def elapsed(call: Callable[[], object], times: int) -> float:
    """Seconds that `times` calls take on the current stream of ``torch.cuda``, each with cold caches.

    How often memory is written before a call follows from how long its launch took when the same call was timed before, so that the
    first block of a call may contain gaps; `accelcheck.measure.clocks.settle` throws it away. The call is run exactly `times` times.
    """
    import torch

    size = max(FLUSHED, torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    memory = torch.empty(size, dtype=torch.int8, device="cuda")
    writes = _WRITES.get(call, 1)
    marks: list[list[Any]] = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(times)]  # type: ignore[no-untyped-call]  # torch does not annotate events
    launch = math.inf
    torch.cuda.synchronize()
    for before, start, end in marks:
        before.record()
        for _ in range(writes):
            memory.zero_()
        start.record()
        launched = time.perf_counter()
        call()
        # The least of all: where the stream's queue is full, a launch waits for the GPU.
        launch = min(launch, time.perf_counter() - launched)
        end.record()
    torch.cuda.synchronize()
    written = min(float(before.elapsed_time(start)) for before, start, _ in marks) / 1e3  # of milliseconds
    _WRITES[call] = following(writes, launch, written)
    return float(sum(start.elapsed_time(end) for _, start, end in marks)) / 1e3


def following(writes: int, launch: float, written: float) -> int:
    """How often to write before the next calls.

    Args:
        writes: How often it was done before each of these calls.
        launch: Seconds that the host took to launch one.
        written: Seconds that these writes took on the GPU.
    """
    if written <= 0.0 or (writes > 1 and launch > WAITED * written):
        return 1  # it waits for the GPU itself, or nothing covers it: more writes only take longer
    each = written / writes
    return max(1, min(math.ceil(MARGIN * launch / each), int(LONGEST / each)))
