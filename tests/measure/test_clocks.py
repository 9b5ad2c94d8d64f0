"""Clocks: how long a block is, when times have settled, and that nothing disturbs them. On clocks that tests set."""

from __future__ import annotations

import gc
import math
import platform
import sys
import textwrap
from collections.abc import Callable

import pytest
from process_harness import completed
from technique_harness import StubDevice

from accelcheck.measure.clocks import (
    BLOCK,
    GROWTH,
    MOST_CALLS,
    PATIENCE,
    WINDOW,
    ClockError,
    block,
    settle,
    undisturbed,
)


class Clocked(StubDevice):
    """So many calls take what a test says, after first times that it sets apart; nothing is called."""

    def __init__(self, seconds: Callable[[int], float], *first: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.first = list(first)
        self.tried: list[int] = []

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        self.tried.append(times)
        return self.first.pop(0) if self.first else self.seconds(times)


def nothing() -> None:
    return


def steady(each: float) -> Clocked:
    return Clocked(lambda times: times * each)


@pytest.mark.parametrize("each", [2e-7, 3e-6, 1e-4, 9e-4])
def test_a_block_is_of_as_many_calls_as_its_length_needs(each: float) -> None:
    device = steady(each)
    assert block(device, nothing)() == pytest.approx(each)
    times = device.tried[-1]
    assert BLOCK <= times * each < 2.5 * BLOCK


def test_a_call_that_is_long_enough_is_a_block_by_itself() -> None:
    device = steady(0.5)
    assert block(device, nothing)() == 0.5
    assert device.tried == [1, 1, 1]


def test_the_number_of_calls_grows_until_it_suffices() -> None:
    device = Clocked(lambda times: 2e-5 + times * 1e-6)  # reading this clock takes longer than a call
    block(device, nothing)
    tried = list(dict.fromkeys(device.tried))
    assert tried == sorted(tried)
    assert len(tried) > 2
    assert 2e-5 + tried[-1] * 1e-6 >= BLOCK


def test_a_clock_that_always_reads_almost_a_block_does_not_make_it_creep() -> None:
    device = Clocked(lambda _: 0.99 * BLOCK)
    block(device, nothing)
    assert len(device.tried) == 2 * 17  # doubled from 1 to `MOST_CALLS`, two readings each


def test_what_takes_no_time_ends_at_most_calls() -> None:
    device = steady(1e-12)
    block(device, nothing)
    assert max(device.tried) == MOST_CALLS


def test_a_first_call_that_compiles_does_not_make_the_block() -> None:
    device = Clocked(lambda times: times * 1e-5, 3.0)
    block(device, nothing)()
    assert device.tried[-1] >= 100


def test_a_clock_that_says_0_once_does_not_make_a_block_of_most_calls() -> None:
    device = Clocked(lambda times: times * 5e-3, 0.0)
    block(device, nothing)
    assert max(device.tried) <= GROWTH


@pytest.mark.parametrize("wrong", [0.0, -1e-3, math.nan, math.inf])
def test_a_clock_that_stands_still_or_goes_backwards_gives_no_figure(wrong: float) -> None:
    timed = block(Clocked(lambda times: wrong * times, 1.0, 1.0), nothing)
    with pytest.raises(ClockError, match=r"stub: expected 1 calls to take a positive time, the clock says"):
        timed()


def test_a_clock_that_never_goes_on_is_no_endless_loop() -> None:
    timed = block(steady(0.0), nothing)
    with pytest.raises(ClockError):
        timed()


def test_the_calls_of_a_block_are_made() -> None:
    calls = []
    timed = block(StubDevice(), lambda: calls.append(1))
    before = len(calls)
    assert timed() > 0.0
    assert len(calls) > before


class Warming:
    """Blocks that take one time after the other, on a clock of their own; the last one for ever."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)
        self.at = 0.0
        self.blocks = 0

    def timed(self) -> float:
        value = self.seconds[min(self.blocks, len(self.seconds) - 1)]
        self.blocks += 1
        self.at += value
        return value

    def now(self) -> float:
        return self.at


def test_steady_times_settle_in_two_windows() -> None:
    warming = Warming(0.01)
    assert settle(warming.timed, warming.now) == 2 * WINDOW == warming.blocks


def test_falling_times_are_waited_for() -> None:
    warming = Warming(*(0.02 * 0.9 ** (number // WINDOW) for number in range(6 * WINDOW)))
    assert settle(warming.timed, warming.now) == 7 * WINDOW  # six that fall, and one that does not


def test_one_slow_block_in_a_window_is_not_taken_for_warming_up() -> None:
    warming = Warming(0.5, *[0.01] * 20)
    assert settle(warming.timed, warming.now) == 2 * WINDOW


def test_rising_times_are_no_reason_to_wait() -> None:
    warming = Warming(*(0.01 * 1.1**number for number in range(100)))
    assert settle(warming.timed, warming.now) == 2 * WINDOW


def test_times_that_fall_for_ever_are_left_when_patience_ends() -> None:
    warming = Warming(*(0.1 * 0.97**number for number in range(200)))
    count = settle(warming.timed, warming.now)
    assert PATIENCE <= warming.at < PATIENCE + WINDOW * 0.1
    assert count == warming.blocks < 200


def test_warming_up_ends_with_the_block_that_exceeds_the_patience() -> None:
    assert settle((slow := Warming(10.0)).timed, slow.now) == 1
    assert settle((slow := Warming(PATIENCE / 2)).timed, slow.now) == 2


def test_garbage_is_collected_before_and_not_within() -> None:
    collections = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append((phase, info["generation"]))

    gc.callbacks.append(note)
    try:
        with undisturbed():
            assert ("start", 2) in collections  # everything that there was
            collections.clear()
            assert not gc.isenabled()
            _ = [[number] for number in range(100_000)]
            assert not collections
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)


def test_garbage_collection_comes_back_after_an_error() -> None:
    with pytest.raises(ClockError), undisturbed():
        raise ClockError
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with undisturbed():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_a_process_that_has_settled_keeps_the_memory_that_it_frees() -> None:
    code = """
        import ctypes, resource
        from accelcheck.measure.clocks import settle

        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        size = 64 << 20  # glibc returns it at once by itself

        def touched():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                block = libc.malloc(ctypes.c_size_t(size))
                libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(size))
                libc.free(ctypes.c_void_p(block))
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        first = touched()
        settle(lambda: 1.0)
        touched()
        print(first, touched())
        """
    done = completed([sys.executable, "-c", textwrap.dedent(code)], check=True)
    before, after = map(int, done.stdout.split())
    assert before > 100  # pages, of whichever size
    assert after < before / 10
