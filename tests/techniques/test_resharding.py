"""Distributed checkpoints in real ranks: no bit changes, and faults that change one fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fault_harness import bench, case, seeded
from technique_harness import StubDevice, named, workload

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices import devices
from accelcheck.devices.base import Device
from accelcheck.techniques.distributed import pool
from accelcheck.techniques.distributed.resharding import TECHNIQUES, Reshard
from accelcheck.techniques.distributed.resharding_ranks import Phase, Resharded
from accelcheck.techniques.distributed.strategy import RankReport
from accelcheck.verify.oracle import Store

pytestmark = pytest.mark.slow  # ranks that save and load checkpoints

CPU = devices()["cpu"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    yield Store(tmp_path_factory.mktemp("oracle"))
    pool.close_all()


def record_of(store: Store, technique: Reshard, name: str = "train-mlp") -> Record:
    thing = seeded(name)
    return bench(store, technique, thing, CPU).run(case(thing, Mode.TRAIN, technique=technique.name))


def missing(record: Record) -> list[str]:
    return [entry.claim for entry in record.evidence if not entry.engaged]


def test_ranks_resume_from_checkpoints_of_other_ranks(store: Store) -> None:
    record = record_of(store, Reshard())
    assert record.verdict is Verdict.PASS, record.why
    seen = {entry.claim: entry.observed for entry in record.evidence}
    assert seen["parameters saved as split by dimension 0 over 3 = 6"] == 6
    assert seen["tensors saved by 3 and loaded by 1 >= 12, none of them changed"] == "12, changed: none"


class Careless(Resharded):
    """Loses part of the state."""

    def lose(self, phase: Phase) -> None:
        """Called after every load."""
        raise NotImplementedError

    def run(self, device: Device) -> RankReport:
        plain = Phase.load

        def load(phase: Phase, folder: Path) -> None:
            plain(phase, folder)
            self.lose(phase)

        setattr(Phase, "load", load)  # noqa: B010 - in the rank, until the job is done
        try:
            return super().run(device)
        finally:
            setattr(Phase, "load", plain)  # noqa: B010 - see above


class Forgetful(Careless):
    """Loses the optimizer's state."""

    def lose(self, phase: Phase) -> None:
        phase.optimizer.state.clear()


class Lossy(Careless):
    """Changes one element in one of the loads."""

    @torch.no_grad()
    def lose(self, phase: Phase) -> None:
        if phase.mesh.size() == 1:
            next(phase.program.module.parameters()).view(-1)[0].zero_()


@pytest.mark.parametrize(
    ("job", "claim"),
    [
        (Forgetful, "tensors saved by 2 and loaded by 3 >= 12, none of them changed"),
        (Lossy, "tensors saved by 3 and loaded by 1 >= 12, none of them changed"),
    ],
    ids=["optimizer", "element"],
)
def test_lost_state_fails(store: Store, job: type[Resharded], claim: str) -> None:
    class Losing(Reshard):
        pass

    Losing.job = job
    record = record_of(store, Losing())
    assert record.verdict is Verdict.FAIL
    assert claim in missing(record)
    assert any(line.startswith("parameter:") for line in record.why.splitlines())


def test_capability_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = named(TECHNIQUES, "dcp-reshard")
    assert technique.capability(StubDevice()).ok
    assert technique.capability(StubDevice("xla")).code is Code.NO_BACKEND
    assert not technique.accepts(workload("training", "batchnorm"))
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capability = technique.capability(StubDevice("cuda"))
    assert (capability.verdict, capability.code) == (Verdict.UNAVAILABLE, Code.NO_HARDWARE)
