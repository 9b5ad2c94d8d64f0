"""Times kernels on a GPU's stream: with cold caches, and without the time that the host takes to launch them.

Writes before each call evict every cache. While the GPU writes, the host launches the timed kernels, so that they stand
in the stream when the first one starts; otherwise the gaps between launches would be timed too. Triton's ``do_bench``
writes 256 MB for the caches alone (python/triton/testing.py). NVIDIA's nvbench holds the stream by a kernel that waits
for the host, which deadlocks where a call waits for the device or loads a module
(https://github.com/NVIDIA/nvbench/issues/240). Repeated writes hold it without that danger.
"""

import math
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

FLUSHED = 256 << 20
"""Least bytes to write before a call, as in Triton: twice the largest L2 (B200: 126 MB), MI300X's whole last cache."""
MARGIN = 2.0
"""Duration of the writes, as a multiple of the launch in the previous block: a host is seldom that much slower."""
WAITED = 0.75
"""Part of several writes above which a launch has waited for them; one that has not takes 1 / `MARGIN`."""
LONGEST = 1e-2
"""Longest writes before a call, in seconds. Part of a longer launch stays in the time, as in an application."""

_WRITES: WeakKeyDictionary[Callable[[], object], int] = WeakKeyDictionary()


def elapsed(call: Callable[[], object], times: int) -> float:
    """Seconds that `times` calls take on the current stream of ``torch.cuda``, each with cold caches.

    The number of writes follows from the launch time when the same call was last timed, so that its first block may
    contain gaps; `accelcheck.measure.clocks.settle` throws that block away. The call is run exactly `times` times.
    """
    import torch

    size = max(FLUSHED, torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    memory = torch.empty(size, dtype=torch.int8, device="cuda")
    writes = _WRITES.get(call, 1)
    event: Any = torch.cuda.Event  # torch does not annotate events
    marks = [[event(enable_timing=True) for _ in range(3)] for _ in range(times)]
    launch = math.inf
    torch.cuda.synchronize()
    for before, start, end in marks:
        before.record()
        for _ in range(writes):
            memory.zero_()
        start.record()
        launched = time.perf_counter()
        call()
        # The least: where the stream's queue is full, a launch waits for the GPU.
        launch = min(launch, time.perf_counter() - launched)
        end.record()
    torch.cuda.synchronize()
    written = min(float(before.elapsed_time(start)) for before, start, _ in marks) / 1e3  # of milliseconds
    _WRITES[call] = following(writes, launch, written)
    return float(sum(start.elapsed_time(end) for _, start, end in marks)) / 1e3


def following(writes: int, launch: float, written: float) -> int:
    """Number of writes before each next call, from that before these, and the seconds of a launch and these writes."""
    if written <= 0.0 or (writes > 1 and launch > WAITED * written):
        return 1  # the call waits for the GPU itself, or nothing covers it: more writes only take longer
    each = written / writes
    return max(1, min(math.ceil(MARGIN * launch / each), int(LONGEST / each)))
