"""A rank pool does trainings in turn; a rank that raises or dies is named, and nothing stays behind."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from process_harness import completed, left
from rank_strategies import Broken, ByHand, Dying, Raising, small
from technique_harness import differences, mlp

from accelcheck.core.case import Mode
from accelcheck.core.processes import ChildError
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques.distributed import pool as pools
from accelcheck.techniques.distributed.pool import RankPool
from accelcheck.techniques.distributed.strategy import Strategy, TrainingJob
from accelcheck.workloads.base import Program


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    made = RankPool(Cpu(), 2)
    yield made
    made.close()


def program(seed: int = 0) -> Program:
    return Program.of(small().problem(seed), seed=seed)


@pytest.mark.slow
def test_ranks_train_as_one_process_does_one_job_after_the_other(two: RankPool) -> None:
    for seed in (0, 1):
        job = TrainingJob.of(program(seed), ByHand())
        first, second = two.train(job)
        expected = program(seed).run(Mode.TRAIN)
        assert not differences(first.result, expected, 1e-6)
        assert {path: tensor.dtype for path, tensor in first.result.items()} == dict.fromkeys(expected, torch.float32)
        assert [first.pid, second.pid] == two.pids
        assert not second.result
        assert first.digests == second.digests
        assert [first.facts, second.facts] == [{"rank": 0, "samples": 4}, {"rank": 1, "samples": 3}]
        assert first.calls == second.calls == [{"allreduce_": 4}] * 6
        assert first.sent == second.sent == [4 * (12 * 20 + 20 + 20 * 5 + 5)] * 6


@pytest.mark.slow
def test_a_pool_ends_with_its_process_and_before_its_files_go() -> None:
    code = (
        "from accelcheck.devices.cpu import Cpu\n"
        "from accelcheck.techniques.distributed.pool import rank_pool\n"
        "print(*rank_pool(Cpu(), 2).pids)\n"
    )
    ended = completed([sys.executable, "-c", code], check=True, timeout=120)
    assert "Traceback" not in ended.stderr  # such as of a watcher whose folder went first
    assert not left(*map(int, ended.stdout.split()))


def test_a_job_leaves_the_program_as_it_is(two: RankPool) -> None:
    asked = program()
    before = [parameter.detach().clone() for parameter in asked.module.parameters()]
    two.train(TrainingJob.of(asked, ByHand()))
    assert all(map(torch.equal, before, asked.module.parameters()))


@pytest.mark.slow
def test_a_job_that_cannot_be_pickled_is_refused_and_the_pool_goes_on(two: RankPool) -> None:
    refused = Program.of(mlp())
    lock = threading.Lock()
    refused.loss = lambda out, _: out.sum() if lock else out
    with pytest.raises(TypeError, match="define its classes and functions at the top of a module"):
        two.train(TrainingJob.of(refused, ByHand()))
    assert two.running
    assert len(two.train(TrainingJob.of(program(), ByHand()))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        pytest.param(
            Raising(),
            r"^rank 1 of 2 raised ValueError: rank 1 does not like this\n[\s\S]*Traceback[\s\S]*line \d+, in prepare",
            id="raises",
        ),
        pytest.param(Dying(), r"^rank 1 of 2 was ended by signal 9; its last output:\nthe last word$", id="is killed"),
    ],
)
def test_a_rank_that_fails_is_named_and_nothing_stays(strategy: Strategy, message: str) -> None:
    failing = RankPool(Cpu(), 2)
    begin = time.monotonic()
    with pytest.raises(ChildError, match=message):
        failing.train(TrainingJob.of(program(), strategy))
    assert time.monotonic() - begin < 20.0  # against 120 that ranks wait for each other
    assert not failing.running
    assert not left(*failing.pids)


def test_a_pool_is_kept_until_it_ends_or_is_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        running = True

        def __init__(self, device: Cpu, world: int) -> None:
            assert device.name == "cpu"
            self.world = world

        def close(self) -> None:
            self.running = False

    monkeypatch.setattr(pools, "RankPool", Kept)
    monkeypatch.setattr(pools, "_pools", {})
    two, three = pools.rank_pool(Cpu(), 2), pools.rank_pool(Cpu(), 3)
    assert (two.world, three.world) == (2, 3)
    assert pools.rank_pool(Cpu(), 2) is two
    two.close()
    again = pools.rank_pool(Cpu(), 2)
    assert again is not two
    pools.close_all()
    assert not again.running
    assert not three.running


@pytest.mark.slow
def test_ranks_that_cannot_open_the_device_say_so() -> None:
    with pytest.raises(ChildError, match=r"^rank \d of 2 raised RuntimeError: no such device\n"):
        RankPool(Broken(), 2)
