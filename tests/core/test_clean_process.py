"""The fork that computes what judges others."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from process_harness import left

from accelcheck.core import clean_process
from accelcheck.core.clean_process import CleanProcess, CleanProcessError
from accelcheck.core.processes import End

STATE = {"changed": False}


def state() -> bool:
    return STATE["changed"]


def change() -> None:
    STATE["changed"] = True


def fails(error: BaseException) -> None:
    raise error


def dies(number: int) -> None:
    print("about to die", flush=True)
    os.kill(os.getpid(), number)


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def odd() -> None:
    raise OddError(1, 2)


@pytest.fixture(autouse=True)
def _no_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one takes seconds; tests/core/test_native_stacks.py has its own."""
    monkeypatch.setattr(clean_process, "native_stacks", lambda _: "")


@pytest.fixture
def clean() -> Iterator[CleanProcess]:
    made = CleanProcess([])
    yield made
    made.close()


def test_it_does_not_see_what_changes_here(clean: CleanProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATE, "changed", True)
    assert state()
    assert not clean.call(state)


def test_what_it_changes_stays_there(clean: CleanProcess) -> None:
    clean.call(change)
    assert clean.call(state)
    assert not state()


def test_known_objects_are_sent_by_reference() -> None:
    add = lambda a, b: a + b  # noqa: E731 - it cannot be pickled
    clean = CleanProcess([add])
    assert clean.call(add, 2, 3) == 5
    clean.close()


def test_what_cannot_be_sent_is_named(clean: CleanProcess) -> None:
    with pytest.raises(CleanProcessError, match=r"len: cannot be sent to the clean process.*register what it names"):
        clean.call(len, lambda: None)
    assert clean.call(len, [1]) == 1


def made_there() -> list[int]:
    """A list that begins with the process that made it."""
    return [os.getpid()]


def test_a_call_is_given_what_the_process_began_with_and_the_next_process_its_own() -> None:
    clean = CleanProcess([], ((made_there, 30.0),))
    first = clean.pid
    assert clean.call(list.copy, clean.begun) == [first]
    clean.call(list.append, clean.begun, 2)
    assert clean.call(list.copy, clean.begun) == [first, 2]
    clean.renew()
    assert clean.call(list.copy, clean.begun) == [clean.pid]
    assert clean.pid != first
    clean.close()


def test_an_exception_is_raised_here_with_its_traceback(clean: CleanProcess) -> None:
    with pytest.raises(ValueError, match="wrong") as caught:
        clean.call(fails, ValueError("wrong"))
    assert "in fails" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_sent_comes_as_text(clean: CleanProcess) -> None:
    with pytest.raises(CleanProcessError, match="OddError: 1 and 2"):
        clean.call(odd)


@pytest.mark.parametrize(
    ("error", "others"),
    [
        *[(error, ()) for error in (SystemExit(1), SystemExit(0), EOFError("of a file"))],
        *[(error, CleanProcessError) for error in (KeyboardInterrupt(), pytest.skip.Exception("no"), GeneratorExit())],
    ],
)
def test_whatever_a_function_raises_ends_its_call_alone(clean: CleanProcess, error: BaseException, others: Any) -> None:
    words = "of a file" if isinstance(error, EOFError) else None
    with pytest.raises((type(error), *([others] if others else [])), match=words):
        clean.call(fails, error)
    assert clean.call(len, [1]) == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_a_death_is_told_and_the_next_fork_is_as_clean(clean: CleanProcess, number: signal.Signals) -> None:
    clean.call(change)
    with pytest.raises(CleanProcessError, match=rf"ran dies died of {number.name}") as caught:
        clean.call(dies, number)
    assert "about to die" in str(caught.value)
    assert not clean.call(state)


@pytest.mark.parametrize("status", [0, 1, 3, 96, 97])
def test_a_function_that_ends_the_process_is_told(clean: CleanProcess, status: int) -> None:
    with pytest.raises(CleanProcessError, match=f"ended with status {status}"):
        clean.call(os._exit, status)
    assert clean.call(len, [1]) == 1


def test_the_answer_to_an_interrupted_call_is_not_taken_for_the_next(clean: CleanProcess) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            clean.call(time.sleep, 0.5)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert clean.call(len, [1, 2]) == 2


def test_the_first_beginning_that_returns_is_kept() -> None:
    clean = CleanProcess([], ((lambda: time.sleep(60), 0.2), (change, 30.0)))
    assert clean.call(state)
    clean.close()


def test_a_beginning_that_raises_is_an_error_that_quotes_it() -> None:
    def broken() -> None:
        raise OSError("no such threads")

    with pytest.raises(CleanProcessError, match="no such threads"):
        CleanProcess([], ((broken, 30.0),))


def test_collections_leave_alone_what_forks_share_until_it_is_closed() -> None:
    before = gc.get_freeze_count()
    clean = CleanProcess([])
    assert gc.get_freeze_count() > before
    assert clean.call(gc.get_freeze_count) > 0
    clean.close()
    assert gc.get_freeze_count() == 0


def test_nothing_is_left_when_it_is_closed() -> None:
    clean = CleanProcess([])
    computing = clean.call(os.getpid)
    clean.close()
    clean.close()
    assert not left(computing)


def leaves_another() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid


@pytest.mark.parametrize("function", [os.getpid, leaves_another])
def test_it_ends_with_the_process_that_made_it_and_so_does_what_it_started(function: Callable[[], int]) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = CleanProcess([])
        os.write(writer, str(made.call(function)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    assert not left(int(os.read(reader, 20)))


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def holds_the_gil() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # in C, for longer than anyone waits


def starts_another(file: str) -> None:
    Path(file).write_text(str(leaves_another()))
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(("function", "arguments"), [(sleeps, (600.0,)), (holds_the_gil, ())])
def test_what_takes_too_long_is_killed_with_its_stacks(
    clean: CleanProcess, function: Callable[..., None], arguments: tuple[float, ...]
) -> None:
    with pytest.raises(CleanProcessError, match=r"ran for longer than 0\.2 s and was killed") as caught:
        clean.call(function, *arguments, limit=0.2)
    assert caught.value.end == End(-signal.SIGKILL, 0.2)
    assert f"in {function.__name__}" in caught.value.printed
    assert clean.call(len, [1], limit=60.0) == 1


def test_a_call_that_ends_in_time_is_not_killed(clean: CleanProcess) -> None:
    before = clean.call(os.getpid, limit=60.0)
    clean.call(sleeps, 0.2, limit=60.0)
    assert clean.call(os.getpid) == before == clean.pid


def test_a_death_between_two_calls_is_no_matter_of_the_next(clean: CleanProcess) -> None:
    before = clean.call(os.getpid)
    clean.renew()
    assert clean.call(os.getpid) != before


def test_what_a_process_that_died_had_started_is_ended(clean: CleanProcess, tmp_path: Path) -> None:
    with pytest.raises(CleanProcessError, match="SIGSEGV"):
        clean.call(starts_another, str(tmp_path / "pid"))
    assert not left(int((tmp_path / "pid").read_text()))


def kills_its_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def signals_its_group() -> None:
    os.killpg(0, signal.SIGKILL)


def test_a_function_that_kills_its_process_group_ends_its_call_alone(clean: CleanProcess) -> None:
    with pytest.raises(CleanProcessError, match="died of SIGKILL"):
        clean.call(signals_its_group)
    assert clean.call(len, [1]) == 1


def test_a_process_that_is_gone_is_told_at_once_and_at_each_call(clean: CleanProcess) -> None:
    for _ in range(2):
        with pytest.raises(CleanProcessError, match="the clean process is gone"):
            clean.call(kills_its_parent)
        assert clean.gone


class Sometimes:
    """Begins as its numbers say: seconds to wait; negative ones raise."""

    def __init__(self, folder: Path, *seconds: float) -> None:
        self.file = folder / "begun"
        self.seconds = seconds

    def __call__(self) -> None:
        with self.file.open("a") as file:
            file.write(".")
        seconds = self.seconds[min(self.file.stat().st_size, len(self.seconds)) - 1]
        if seconds < 0:
            raise OSError("not this time")
        time.sleep(seconds)


@pytest.mark.parametrize("seconds", [600.0, -1.0], ids=["hangs", "raises"])
@pytest.mark.parametrize("again", [True, False], ids=["then begins", "never begins"])
def test_a_fork_that_does_not_begin_once_is_replaced_and_one_that_never_does_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, again: bool
) -> None:
    monkeypatch.setattr(clean_process, "BEGIN_AGAIN", 0.3)
    clean = CleanProcess([], ((Sometimes(tmp_path, 0.0, seconds, *([0.0] if again else [])), 0.3),))
    with pytest.raises(CleanProcessError, match="ended with status 0"):
        clean.call(os._exit, 0)
    with nullcontext() if again else pytest.raises(CleanProcessError, match=r"does not begin within|is gone"):
        assert clean.call(len, [1]) == 1
    clean.close()
