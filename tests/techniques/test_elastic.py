"""Elastic training: a killed rank does not change the result, and without snapshots the evidence fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_harness import bench, case, seeded
from technique_harness import StubDevice, named, workload
from torch import distributed

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.processes import ChildError, Mailbox
from accelcheck.devices import devices
from accelcheck.techniques.distributed.elastic import rank as elastic_rank
from accelcheck.techniques.distributed.elastic.elastic_agents import ElasticAgents, c10d
from accelcheck.techniques.distributed.elastic.rank import Rank, SharedBackward, TrainingReport, TrainingTask
from accelcheck.techniques.distributed.elastic.restarts import TECHNIQUES, Restart
from accelcheck.techniques.processes.evidence import unlike
from accelcheck.techniques.snapshots.files import Snapshots
from accelcheck.techniques.snapshots.stepwise import StepwiseTraining
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program

CPU = devices()["cpu"]


def task(name: str = "train-mlp", **options: Any) -> TrainingTask:
    return TrainingTask(seeded(name).problem(1), torch.float32, 1, 1, **options)


# Trainings by ranks in this process, one after the other, without torchrun.
class KilledError(Exception):
    """Raised in place of a signal."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank in this process, whose victim raises `KilledError`."""

    def fall(self: Rank, step: int) -> None:
        if step == self.task.victim and self.restarts == 0:
            raise KilledError

    monkeypatch.setattr(Rank, "_fall", fall)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    store = distributed.HashStore()  # type: ignore[attr-defined]  # torch's annotations leave it out
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def killed_and_gone_on(folder: Path, monkeypatch: pytest.MonkeyPatch, given: TrainingTask) -> TrainingReport:
    mailbox = Mailbox(folder)
    mailbox.put("task-0", given)
    with pytest.raises(KilledError):
        Rank(mailbox, 0, CPU).train()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    return Rank(mailbox, 0, CPU).train()


def undisturbed(folder: Path, given: TrainingTask) -> TrainingReport:
    folder.mkdir()
    mailbox = Mailbox(folder)
    mailbox.put("task-0", replace(given, victim=-1))
    return Rank(mailbox, 0, CPU).train()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["train-mlp", "train-transformer"])
def test_a_training_resumes_from_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    given = task(name, every=2, victim=3)
    straight = undisturbed(tmp_path / "straight", given)
    answer = killed_and_gone_on(tmp_path, monkeypatch, given)
    assert (answer.starts, answer.restarts, answer.worlds) == ((0, 2), 1, (1, 1, 1, 1))
    assert unlike(straight.state, answer.state) == []
    expected = Program.of(given.problem, seed=1).run(Mode.TRAIN)
    for path, tensor in expected.items():
        name = path.partition(":")[2]
        got = answer.state["module"][name] if name else answer.state["losses"][int(path[5:-1])]
        torch.testing.assert_close(got, tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_without_a_snapshot_the_training_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "latest", lambda _: None)
    assert killed_and_gone_on(tmp_path, monkeypatch, task(victim=3)).starts == (0,)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("part", ["module", "optimizer"])
def test_a_part_that_is_left_out_changes_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    given = task(victim=3)
    straight = undisturbed(tmp_path / "straight", given)
    load = StepwiseTraining.load

    def forgetful(self: StepwiseTraining, state: Any) -> None:
        load(self, {**state, part: self.state()[part]})

    monkeypatch.setattr(StepwiseTraining, "load", forgetful)
    answer = killed_and_gone_on(tmp_path, monkeypatch, given)
    assert any(path.startswith("module") for path in unlike(straight.state, answer.state))


@pytest.mark.usefixtures("alone")
def test_a_step_waits_for_a_world_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_rank, "PATIENCE", 0.1)
    mailbox = Mailbox(tmp_path)
    mailbox.put("task-0", task(worlds=(1, 1, 5, 1)))
    with pytest.raises(TimeoutError, match=r"step 2: expected a world of 5 ranks, after 0\.1 s it is 1"):
        Rank(mailbox, 0, CPU).train()
    assert mailbox.has("wanted-0-2")
    latest = Snapshots(tmp_path / "snapshots-0").latest()
    assert latest is not None
    assert latest.step == 2


def ended(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rank: int,
    world: int,
    sent: list[torch.Tensor],
    total: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Loss and gradients of a rank. `sent` gets what it sends; its sum over all ranks is `total`, if that is given."""

    def meet(rows: torch.Tensor) -> None:
        sent.append(rows.clone())
        rows.copy_(rows if total is None else total)

    stub = SimpleNamespace(get_rank=lambda: rank, get_world_size=lambda: world, all_reduce=meet)
    monkeypatch.setattr(elastic_rank, "distributed", stub)
    program = Program.of(seeded(name).problem(1), seed=1)
    loss = SharedBackward(program, lambda _: None)(0)
    return [loss, *(p.grad for p in program.module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["train-mlp", "train-transformer"])
def test_worlds_of_all_sizes_give_bitwise_equal_results(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ends = []
    for world in (1, 2, 3, 4):
        sent: list[torch.Tensor] = []
        for rank in range(world):
            ended(monkeypatch, name, rank, world, sent, None)
        total = torch.stack(sent).sum(0)
        ends += [ended(monkeypatch, name, rank, world, [], total) for rank in range(world)]
    plain = Program.of(seeded(name).problem(1), seed=1)
    loss = plain.training_loss(plain.inputs, plain.target)
    loss.backward()  # type: ignore[no-untyped-call]  # torch annotates it in part
    expected = [loss.detach(), *(p.grad for p in plain.module.parameters() if p.grad is not None)]
    assert len(ends) == 10
    for end in ends:
        assert all(torch.equal(given, first) for given, first in zip(end, ends[0], strict=True))
        for got, wanted in zip(end, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def observed(record: Any, claim: str) -> Any:
    return next(entry.observed for entry in record.evidence if entry.claim.startswith(claim))


@pytest.mark.slow
def test_a_killed_rank_is_restarted_with_the_same_result(store: Store) -> None:
    technique, thing = named(TECHNIQUES, "elastic-restart"), seeded("train-mlp")
    record = bench(store, technique, thing, CPU).run(case(thing, Mode.TRAIN, technique=technique.name))
    assert record.verdict is Verdict.PASS, record.why
    assert observed(record, "exit code of the rank that was killed").startswith("-9 of process ")
    assert observed(record, "restarts by torchrun") == 1
    assert observed(record, "first steps") == "0, 2"
    assert observed(record, "parts of the state") == 0


@pytest.mark.slow
def test_without_snapshots_the_verdict_is_fail(store: Store) -> None:
    class Unsaved(Restart):
        def disturb(self, task: TrainingTask) -> TrainingTask:
            return replace(super().disturb(task), every=1000)

    thing = seeded("train-mlp")
    record = bench(store, Unsaved(), thing, CPU).run(case(thing, Mode.TRAIN, technique="elastic-restart"))
    assert record.verdict is Verdict.FAIL
    assert record.why == "not engaged: first steps of the groups of ranks: 0, 2: observed 0"


def test_capability_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for technique in TECHNIQUES:
        assert technique.modes == {Mode.TRAIN}
        assert not technique.accepts(workload("training", "batchnorm"))
        capability = technique.capability(devices()["tpu"])
        assert (capability.verdict, capability.code) == (Verdict.UNSUPPORTED, Code.NO_FEATURE)
    for kind in ("cpu", "cuda", "xla"):
        assert named(TECHNIQUES, "elastic-restart").capability(StubDevice(kind)).ok
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert TECHNIQUES[0].capability(StubDevice()).code is Code.WRONG_VERSION


def test_etcd_must_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    technique = named(TECHNIQUES, "elastic-etcd")
    assert technique.packages == {"etcd": "pip install python-etcd"}
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(tmp_path / "etcd"))
    capability = technique.capability(StubDevice())
    assert (capability.verdict, capability.code) == (Verdict.UNAVAILABLE, Code.NO_PACKAGE)
    assert "apt-get install etcd-server" in capability.action
    (tmp_path / "etcd").touch(mode=0o755)
    assert technique.capability(StubDevice()).ok


class Broken(StubDevice):
    """A device that cannot be opened in the ranks."""

    def open(self) -> None:
        raise RuntimeError("no such device here")


@pytest.mark.slow
def test_errors_of_ranks_are_quoted() -> None:
    agents = ElasticAgents(c10d(), Broken(), least=1, most=1, ranks=1, restarts=0)
    pid = agents.running[0].pid
    with pytest.raises(ChildError, match="no such device here"):
        agents.train(task())
    agents.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIG_DFL)
