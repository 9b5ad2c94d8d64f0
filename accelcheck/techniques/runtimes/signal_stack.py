"""Saving and restoring this thread's alternate signal stack (Linux), which libraries replace and then free."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class SignalStack(ctypes.Structure):
    """Linux's ``stack_t``."""

    _fields_: ClassVar = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def signal_stack(new: SignalStack | None = None) -> SignalStack:
    """The alternate signal stack of this thread, which is then replaced by `new` if that is given. Linux only.

    Raises:
        OSError: The kernel refuses the new stack.
    """
    was = SignalStack()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaltstack(ctypes.byref(new) if new is not None else None, ctypes.byref(was)):
        raise OSError(ctypes.get_errno(), f"sigaltstack: {os.strerror(ctypes.get_errno())}")
    return was


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Context that restores the signal stack at its end, also where a library has replaced it. No effect except on Linux."""
    if sys.platform != "linux":
        yield
        return
    before = signal_stack()
    try:
        yield
    finally:
        signal_stack(before)
