"""torchrun: an end is reported with the ranks' output, and no process is left running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import alive, left

from accelcheck.core.processes import GRACE, Child, Mailbox
from accelcheck.techniques.processes.torchrun import torchrun

TWO = ["--standalone", "--nproc-per-node=2"]
PIDS = ["pid-0", "pid-1"]


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Child]:
    made = torchrun(TWO, "rank_idle:main", ["stay", tmp_path])
    yield made
    made.end()


def pids(folder: Path, run: Child) -> list[int]:
    answers = Mailbox(folder).wait(PIDS, 60.0, lambda: not run.running)
    assert answers is not None, run.output()
    return answers


@pytest.mark.slow
def test_a_torchrun_whose_ranks_fail_ends_and_quotes_them(tmp_path: Path) -> None:
    with torchrun(TWO, "rank_idle:main", ["complain", tmp_path]) as run:
        assert Mailbox(tmp_path).wait(PIDS, 60.0, lambda: not run.running) is None
        end = run.wait(60.0)
        assert str(end) == "ended with status 1"
        assert "has had enough" in run.output()
        assert "exitcode  : 7" in run.output()


@pytest.mark.slow
def test_ending_leaves_no_process(idle: Child, tmp_path: Path) -> None:
    ranks = pids(tmp_path, idle)
    assert all(map(alive, ranks))
    idle.end(GRACE)
    assert not left(idle.pid, *ranks)


def test_ranks_end_when_torchrun_is_killed(idle: Child, tmp_path: Path) -> None:
    ranks = pids(tmp_path, idle)
    idle.signal(9)
    end = idle.wait(GRACE)
    assert str(end) == "died of SIGKILL"
    assert not left(*ranks)
