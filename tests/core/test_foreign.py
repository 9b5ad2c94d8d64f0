"""Code of other packages: what raises is named, and what does not return is ended."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from process_harness import completed

from accelcheck.core import foreign
from accelcheck.core.foreign import ForeignCodeError, calling


def fails(error: BaseException) -> None:
    raise error


def loops() -> None:
    while True:
        time.sleep(0.01)


def catches_everything() -> None:
    try:
        loops()
    except:  # noqa: E722 - that is the case
        loops()


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(0), pytest.skip.Exception("not here")])
def test_what_raises_is_named_with_its_place(error: BaseException) -> None:
    with (
        pytest.raises(ForeignCodeError, match=rf"the toy raised {type(error).__name__}: ") as raised,
        calling("the toy"),
    ):
        fails(error)
    assert "in fails" in str(raised.value)


def test_an_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt), calling("the toy", 60.0):
        raise KeyboardInterrupt


@pytest.mark.parametrize("function", [loops, catches_everything])
def test_what_does_not_return_is_named_with_its_place(function: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(ForeignCodeError, match=r"the toy did not return within 0\.2 s") as raised,
        calling("the toy", 0.2),
    ):
        function()
    assert "in loops" in str(raised.value)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_elsewhere_than_in_the_main_thread_there_is_no_limit() -> None:
    done = []

    def call() -> None:
        with calling("the toy", 0.05):
            time.sleep(0.2)
        done.append(1)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert done == [1]


def test_the_alarm_of_somebody_else_stays() -> None:
    signal.setitimer(signal.ITIMER_REAL, 600.0)
    try:
        with calling("the toy", 60.0):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 100.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def test_what_holds_the_interpreter_ends_the_process_and_is_named() -> None:
    code = """
import re
from accelcheck.core import foreign
foreign.HELD = 0.2
foreign.keep_stderr()
def holds(): re.match(r"(a+)+$", "a" * 60 + "b")
with foreign.calling("the toy", 0.2): holds()
"""
    ran = completed([sys.executable, "-c", code], timeout=120)
    assert ran.returncode == 1
    assert "in holds" in ran.stderr
    assert foreign.HELD == 10.0
