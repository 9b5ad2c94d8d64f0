"""torchrun: what is handed over appears whole, what ends is told, and nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accelcheck.techniques.processes.torchrun import RanksError, Torchrun, awaited, looks, put, take

if TYPE_CHECKING:
    from collections.abc import Iterator

TWO = ["--standalone", "--nproc-per-node=2"]
PROGRAM = "rank_idle"


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def left(*pids: int, seconds: float = 5.0) -> list[int]:
    """Which of the processes still run after that time at most."""
    for _ in looks(seconds):
        if not any(map(alive, pids)):
            break
    return [pid for pid in pids if alive(pid)]


class Ended:
    """A torchrun that is not there, or is."""

    def __init__(self, *, running: bool) -> None:
        self.running = running

    def wait(self, seconds: float) -> int:
        assert seconds == 0
        return 3

    def said(self) -> str:
        return "its last words"


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(TWO, PROGRAM, ["stay", str(tmp_path)], tmp_path / "log", {})
    yield made
    made.close()


def test_what_is_put_can_be_taken_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    put(tmp_path / "value", {"numbers": [1, 2.5]})
    assert take(tmp_path / "value") == {"numbers": [1, 2.5]}
    assert [path.name for path in tmp_path.iterdir()] == ["value"]


def test_a_reader_sees_a_value_whole_whenever_it_looks(tmp_path: Path) -> None:
    values = [[number] * 200_000 for number in (1, 2)]
    path = tmp_path / "value"
    put(path, values[0])

    def write() -> None:
        for number in range(60):
            put(path, values[number % 2])

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(take(path))
    writer.join()
    assert seen
    assert all(value in values for value in seen)


def test_what_cannot_be_pickled_is_refused_and_the_old_value_stays(tmp_path: Path) -> None:
    put(tmp_path / "value", 1)
    with pytest.raises(
        TypeError, match=r"cannot be sent to another process: .*define its classes and functions at the top"
    ):
        put(tmp_path / "value", lambda: 2)
    assert take(tmp_path / "value") == 1


def test_values_are_given_when_all_are_there(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    put(paths[0], 1)
    threading.Timer(0.2, put, (paths[1], 2)).start()
    assert awaited(paths, 5.0, Ended(running=True)) == [1, 2]  # type: ignore[arg-type]  # a stand-in


def test_an_end_is_told_at_once_with_its_output(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksError, match="torchrun ended with 3, expected results; its output:\nits last words"):
        awaited([tmp_path / "a"], 60.0, Ended(running=False))  # type: ignore[arg-type]  # a stand-in
    assert time.monotonic() - begin < 5.0


def test_silence_is_told_with_what_is_missing(tmp_path: Path) -> None:
    put(tmp_path / "a", 1)
    with pytest.raises(RanksError, match=r"^no b, c after 0\.1 s; the ranks' output:\nits last words$"):
        awaited([tmp_path / name for name in "abc"], 0.1, Ended(running=True))  # type: ignore[arg-type]  # a stand-in


def test_a_torchrun_whose_ranks_fail_ends_and_quotes_them(tmp_path: Path) -> None:
    run = Torchrun(TWO, PROGRAM, ["complain", str(tmp_path)], tmp_path / "log", {})
    try:
        with pytest.raises(
            RanksError, match=r"torchrun ended with 1, expected results; its output:[\s\S]*exitcode *: 7"
        ):
            awaited([tmp_path / "here-0"], 60.0, run)
        assert "has had enough" in run.log.read_text()
    finally:
        run.close()


def test_closing_leaves_no_process(torchrun: Torchrun, tmp_path: Path) -> None:
    pids = awaited([tmp_path / "here-0", tmp_path / "here-1"], 60.0, torchrun)
    assert all(map(alive, pids))
    with pytest.raises(RanksError, match=r"torchrun runs after 0\.1 s, expected its end"):
        torchrun.wait(0.1)
    torchrun.close()
    assert not torchrun.running
    assert not left(*pids)


def test_ranks_leave_when_torchrun_is_killed(torchrun: Torchrun, tmp_path: Path) -> None:
    pids = awaited([tmp_path / "here-0", tmp_path / "here-1"], 60.0, torchrun)
    torchrun.kill()
    torchrun.wait(5.0)
    assert not left(*pids)


def test_ranks_leave_when_who_started_them_is_killed(tmp_path: Path) -> None:
    # Its own parent lives on: what it sees is the end of the pipe that is its standard input, by way of its parent.
    parent = f"import subprocess, sys; subprocess.call([sys.executable, '-m', {PROGRAM!r}, 'stay', {str(tmp_path)!r}])"
    starter = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {parent!r}], stdin=subprocess.PIPE)\n"
        "time.sleep(120)\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen([sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": path})
    try:
        here = tmp_path / "here-0"
        assert any(here.exists() for _ in looks(60.0))
        pid = take(here)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not left(pid)
