from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import pytest

from accelcheck.techniques.runtimes.openvino import SignalStack, signal_stack, signal_stack_kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kept on Linux alone")


@pytest.fixture
def other() -> Iterator[SignalStack]:
    """A stack that may be set; afterwards the thread has its own again."""
    memory = mmap.mmap(-1, 1 << 16)
    before = signal_stack()
    yield SignalStack(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 1 << 16)
    signal_stack(before)


def test_the_stack_is_put_back(other: SignalStack) -> None:
    before = signal_stack()
    with signal_stack_kept():
        signal_stack(other)
        assert signal_stack().address == other.address
    assert signal_stack().address == before.address != other.address


def test_the_stack_is_put_back_when_something_raises(other: SignalStack) -> None:
    before = signal_stack()
    kept = signal_stack_kept()
    kept.__enter__()
    signal_stack(other)
    assert not kept.__exit__(KeyError, KeyError(), None)
    assert signal_stack().address == before.address


def test_a_stack_that_the_kernel_refuses_is_an_error(other: SignalStack) -> None:
    other.size = 1
    with pytest.raises(OSError, match="sigaltstack: Cannot allocate memory"):
        signal_stack(other)
