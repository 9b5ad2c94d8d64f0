"""Child processes: how they are started, watched and ended, and what they report."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from process_harness import alive, left, started

from accelcheck.core import processes
from accelcheck.core.case import Verdict
from accelcheck.core.processes import Child, End, Mailbox, calling, polls

SAY = "from accelcheck.core.processes import say; "
STAY = "import time; time.sleep(600)"
ENDLESS = "while True: say(x=1); time.sleep(0.2)"


def said(child: Child, count: int = 1) -> list[processes.Message]:
    """The messages, as soon as there are so many."""
    for _ in polls(60.0):
        if len(child.messages()) >= count:
            break
    return child.messages()


# For children to call.
def arguments(words: list[str]) -> int:
    processes.say(words=words, argv=sys.argv)
    return 4


def stay(_: list[str]) -> None:
    processes.say(pid=os.getpid())
    time.sleep(600)


def idle(words: list[str]) -> None:
    """Wait for the second parent's end: a child of a child."""
    with Child(calling("test_processes:stay", parent=True)) as child:
        Mailbox(Path(words[0])).put("pids", [os.getpid(), *(message["pid"] for message in said(child))])
        child.wait()


# In the parent.
def test_a_function_is_called_with_its_arguments_and_gives_the_exit_status() -> None:
    with Child(calling("test_processes:arguments", "a b", 3, parent=True)) as child:
        assert child.wait(60.0) == End(4)
        assert child.messages() == [{"words": ["a b", "3"], "argv": ["test_processes", "a b", "3"]}]
        assert not child.running


@pytest.mark.parametrize(
    ("code", "end", "text"),
    [
        ("pass", End(0), "ended with status 0"),
        ("raise SystemExit(3)", End(3), "ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", End(-11), "died of SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", End(-40), "died of signal 40"),
    ],
)
def test_an_end_says_how(code: str, end: End, text: str) -> None:
    with Child(["-c", code]) as child:
        ended = child.wait(60.0)
    assert (ended, str(ended), end.verdict) == (end, text, Verdict.CRASH)
    assert end.how == text.partition(" of " if end.code < 0 else " with ")[2]


def test_a_crash_prints_where() -> None:
    with Child(["-c", "def place():\n    import os; os.kill(os.getpid(), 11)\nplace()"]) as child:
        child.wait(60.0)
        assert "in place" in child.last()


def test_a_child_that_is_too_slow_is_killed() -> None:
    with Child(["-c", SAY + "import time\n" + ENDLESS]) as child:
        end = child.wait(1.0)
    assert end == End(-9, 1.0)
    assert (str(end), end.verdict) == ("ran for longer than 1 s and was killed", Verdict.HANG)


def test_a_limit_counts_from_the_start_where_that_is_asked() -> None:
    with Child(["-c", STAY]) as child:
        time.sleep(0.5)
        begun = time.monotonic()
        assert child.wait(0.6, since=child.started) == End(-9, 0.6)
        assert time.monotonic() - begun < 0.5


def test_an_end_before_the_limit_is_no_hang_when_it_is_seen_late() -> None:
    with Child(["-c", "pass"]) as child:
        assert not left(child.pid, seconds=60.0)
        assert child.wait(0.0) == End(0)


@pytest.mark.slow
def test_only_silence_is_a_hang_where_the_limit_is_one_of_silence() -> None:
    code = f"{SAY}import time\nfor _ in range(20): say(x=1); time.sleep(0.2)\ntime.sleep(600)"
    with Child(["-c", code]) as child:
        assert len(said(child)) >= 1
        assert child.wait(2.0, silence=True) == End(-9, 2.0, silent=True)
        assert len(child.messages()) == 20


def test_a_child_that_stops_itself_goes_on_when_it_is_told_to() -> None:
    code = "from accelcheck.core.processes import say, stop\nfor number in range(3): say(number=number); stop()"
    with Child(["-c", code]) as child:
        for number in range(3):
            assert child.wait(60.0, turns=True) is None
            assert child.running
            assert [message["number"] for message in child.messages()] == list(range(number + 1))
            child.go_on()
        assert child.wait(60.0, turns=True) == End(0)


def test_output_is_that_of_both_streams_and_of_what_the_child_starts() -> None:
    code = "import os, sys; os.system('echo out'); print('err', file=sys.stderr)"
    with Child(["-c", code]) as child:
        child.wait(60.0)
        assert child.output() == "out\nerr\n"
        assert child.last(1) == "err"


@pytest.mark.parametrize("session", [False, True], ids=["in its group", "in a session of its own"])
def test_what_a_child_has_started_ends_with_it(session: bool) -> None:
    code = f"""
import subprocess, sys
from accelcheck.core.processes import say
say(pid=subprocess.Popen([sys.executable, "-c", "{STAY}"], start_new_session={session}).pid)
{STAY}
"""
    with Child(["-c", code]) as child:
        (message,) = said(child)
        assert alive(message["pid"])
    assert not left(child.pid, message["pid"])


def test_what_a_child_leaves_behind_neither_delays_its_end_nor_outlives_it() -> None:
    code = f"""
import subprocess, sys
from accelcheck.core.processes import say
say(pid=subprocess.Popen([sys.executable, "-c", "{STAY}"]).pid)
"""
    with Child(["-c", code]) as child:
        assert child.wait(60.0) == End(0)
        pid = child.messages()[0]["pid"]
        assert alive(pid)
    assert not left(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_a_killed_parent_takes_its_children_and_theirs_along(tmp_path: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; import test_processes; test_processes.idle(sys.argv[1:])"
    with started([sys.executable, "-c", code, tmp_path]) as parent:
        (pids,) = Mailbox(tmp_path).wait(["pids"], 60.0, lambda: parent.poll() is not None) or [[]]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        assert not left(*pids)


def test_an_end_with_grace_lets_the_child_clean_up(tmp_path: Path) -> None:
    code = f"""
import pathlib, signal, sys
from accelcheck.core.processes import say
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).touch(), sys.exit()))
say(ready=True)
{STAY}
"""
    child = Child(["-c", code, str(tmp_path / "cleaned")])
    assert said(child) == [{"ready": True}]
    child.end(60.0)
    assert (tmp_path / "cleaned").exists()
    child.end()  # once more is harmless
    assert (child.running, child.wait()) == (False, End(0))


def test_a_program_that_cannot_be_started_raises() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-python"):
        Child([], python="/no-such-python")


def test_another_interpreter_has_its_own_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import sys; print(sys.argv[1] in sys.path)"
    for python, expected in ((None, "True"), (sys.executable, "False")):
        with Child(["-c", code, str(tmp_path)], python=python) as child:
            child.wait(60.0)
            assert child.last() == expected


def test_messages_that_are_cut_short_are_left_out(tmp_path: Path) -> None:
    code = "import os; open(os.environ['ACCELCHECK_MESSAGES'], 'a').write('1\\n{\"a\": 1}\\nnoise\\n{\"b\": ')"
    with Child(["-c", code]) as child:
        child.wait(60.0)
        assert child.messages() == [{"a": 1}]


def test_without_a_parent_messages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    processes.say(a=[1, "b"])
    assert json.loads(capsys.readouterr().out) == {"a": [1, "b"]}


def test_what_is_put_can_be_taken_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    box.put("value", {"numbers": [1, 2.5]})
    assert box.take("value") == box.coming("value") == {"numbers": [1, 2.5]}
    assert [path.name for path in tmp_path.iterdir()] == ["value"]
    box.remove("value")
    assert not box.has("value")


def test_a_reader_sees_a_value_whole_whenever_it_looks(tmp_path: Path) -> None:
    values = [[number] * 200_000 for number in (1, 2)]
    box = Mailbox(tmp_path)
    box.put("value", values[0])

    def write() -> None:
        for number in range(60):
            box.put("value", values[number % 2])

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(box.take("value"))
    writer.join()
    assert seen
    assert all(value in values for value in seen)


def test_what_cannot_be_pickled_is_refused_and_the_old_value_stays(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    box.put("value", 1)
    with pytest.raises(TypeError, match=r"cannot be sent to another process: .*define its classes and functions"):
        box.put("value", threading.Lock())
    assert box.take("value") == 1


def test_lambdas_and_local_classes_are_sent_with_their_code(tmp_path: Path) -> None:
    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    box = Mailbox(tmp_path)
    box.put("value", (lambda x: x + 1, Local(3)))
    add, local = box.take("value")
    assert (add(1), local.number) == (2, 3)


def test_values_are_given_when_all_are_there(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    box.put("a", 1)
    threading.Timer(0.2, box.put, ("b", 2)).start()
    assert box.wait(["a", "b"], 5.0) == [1, 2]


@pytest.mark.parametrize(
    ("limit", "over"), [(60.0, lambda: True), (0.1, lambda: False)], ids=["none comes", "it is late"]
)
def test_waiting_for_values_ends_without_them(tmp_path: Path, limit: float, over: Callable[[], bool]) -> None:
    box = Mailbox(tmp_path)
    box.put("a", 1)
    begun = time.monotonic()
    assert box.wait(["a", "b"], limit, over) is None
    assert time.monotonic() - begun < 5.0


def fail(who: int) -> None:
    raise ValueError(f"the fault of {who}")


def test_what_processes_raised_is_told_in_order(tmp_path: Path) -> None:
    box = Mailbox(tmp_path)
    for rank in (1, 0):
        try:
            fail(rank)
        except ValueError as error:
            box.raised(rank, error)
        time.sleep(0.02)
    (who, brief, trace), _ = box.errors()
    assert (who, brief) == ("1", "ValueError: the fault of 1")
    assert "in fail" in trace
