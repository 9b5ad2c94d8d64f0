"""The stack that this thread's signal handlers run on. Libraries put another in its place and free it; Linux alone is kept."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class SignalStack(ctypes.Structure):
    """``stack_t`` of Linux."""

    _fields_: ClassVar = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def signal_stack(new: SignalStack | None = None) -> SignalStack:
    """The alternate signal stack of this thread; another one afterwards, if given. Linux alone.

    Raises:
        OSError: The kernel refuses the new one.
    """
    was = SignalStack()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaltstack(ctypes.byref(new) if new is not None else None, ctypes.byref(was)):
        raise OSError(ctypes.get_errno(), f"sigaltstack: {os.strerror(ctypes.get_errno())}")
    return was


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Afterwards handlers run where they ran before, whatever was put in its place meanwhile."""
    if sys.platform != "linux":
        yield
        return
    before = signal_stack()
    try:
        yield
    finally:
        signal_stack(before)
