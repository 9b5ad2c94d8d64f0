"""Prepares a process for forks: gives freed memory back, and ends the threads that OpenMP keeps. No torch.

A fork inherits locks of these threads that nobody opens, and hangs when it computes.
"""

import contextlib
import ctypes
from pathlib import Path

_HARD = 2
"""``omp_pause_hard`` of the OpenMP specification 5.0, 3.2.44: ends all threads of the runtime until its next use."""
_RUNTIMES = ("libgomp", "libomp", "libiomp5")
_MAPS = Path("/proc/self/maps")


def end_threads() -> None:
    """Ends the threads that each loaded OpenMP runtime keeps for this thread. Not for use in a parallel region."""
    for path in _loaded():
        # A runtime without the function, or one that another has replaced: a fork then says that it cannot compute.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)


def _loaded() -> list[str]:
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if ".so" in line}
    return sorted(path for path in paths if Path(path).name.startswith(_RUNTIMES))


def give_back() -> None:
    """Has glibc return free pages, also those between used ones; does nothing with other C libraries.

    glibc keeps freed blocks of up to 32 MiB in its heap (mallopt(3), M_MMAP_THRESHOLD), where the many sizes of a large
    model's tensors leave gaps of hundreds of megabytes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
