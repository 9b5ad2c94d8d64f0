"""Gives memory that was freed back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Have the C library return free pages, also those between others that are in use.

    glibc keeps blocks of up to 32 MiB that were freed in its heap (mallopt(3), M_MMAP_THRESHOLD), where the many sizes of a large model's tensors leave
    gaps of hundreds of megabytes. Elsewhere nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
