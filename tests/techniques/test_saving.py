"""Snapshots that another process loads: nothing is lost, lost parts fail, and damaged files are not used."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fault_harness import bench, case, seeded
from technique_harness import StubDevice, mlp, workload

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.processes import ChildError
from accelcheck.devices import devices
from accelcheck.devices.base import Device
from accelcheck.devices.tpu import Tpu
from accelcheck.devices.xla import Xla
from accelcheck.techniques.processes.evidence import repeated, unlike
from accelcheck.techniques.snapshots import handover
from accelcheck.techniques.snapshots.files import Snapshots, read, write
from accelcheck.techniques.snapshots.handover import ContinuationProcess, ContinuationReport, ContinuationTask, Handover
from accelcheck.techniques.snapshots.saving import DAMAGES, HANDOVER, Relay, SnapshotDamaged, SnapshotRestore
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program
from accelcheck.workloads.trainer import Parts

CPU = devices()["cpu"]


@pytest.fixture(scope="module")
def process() -> Iterator[ContinuationProcess]:
    other = ContinuationProcess(CPU)
    yield other
    other.close()


@pytest.fixture(autouse=True)
def _one_process(process: ContinuationProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """One other process for all cases, since it takes seconds to start."""

    class Shared:
        def __init__(self, device: Device) -> None:
            del device

        def go_on(self, errand: ContinuationTask) -> ContinuationReport:
            return process.go_on(errand)

        def close(self) -> None:
            return

    monkeypatch.setattr(handover, "ContinuationProcess", Shared)


def record_of(store: Store, technique: SnapshotRestore, name: str, mode: Mode) -> Record:
    thing = seeded(name)
    return bench(store, technique, thing, CPU).run(case(thing, mode, technique=technique.name))


def observed(record: Record, claim: str) -> Any:
    return next(entry.observed for entry in record.evidence if entry.claim.startswith(claim))


def missing(record: Record) -> list[str]:
    return [entry.claim for entry in record.evidence if not entry.engaged]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("train-mlp", Mode.TRAIN), ("trajectory-mlp", Mode.TRAJECTORY)])
def test_another_process_gives_the_same_result(store: Store, name: str, mode: Mode) -> None:
    record = record_of(store, SnapshotRestore(), name, mode)
    assert record.verdict is Verdict.PASS, record.why
    assert observed(record, "process that went on") != os.getpid()
    assert observed(record, "parts of the state at the end") == 0
    assert set(observed(record, "its file holds").split(", ")) >= {"generator", "module", "optimizer", "scaler"}


class Losing(SnapshotRestore):
    """Saves a new state in place of one part's."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        relay = program.trainer
        assert isinstance(relay, Relay)
        plain, module, scaler = relay.state, copy.deepcopy(program.module.state_dict()), copy.deepcopy(program.scaler)

        def fresh(program: Program, parts: Parts) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(7).get_state()
            known = {"module": module, "generator": generator, "scaler": scaler and scaler.state_dict()}
            made = {**plain(program, relay.parts(program)), **known}
            return {**plain(program, parts), self.part: made[self.part]}

        vars(relay)["state"] = fresh


@pytest.mark.slow
@pytest.mark.parametrize("part", ["module", "optimizer", "schedule", "loader", "generator", "scaler"])
def test_every_lost_part_fails(store: Store, part: str) -> None:
    record = record_of(store, Losing(part), "trajectory-mlp", Mode.TRAJECTORY)
    assert record.verdict is Verdict.FAIL
    assert "parts of the state at the end that differ from those without a stop = 0" in missing(record)


@pytest.mark.slow
def test_a_lost_optimizer_state_fails_in_a_short_training(store: Store) -> None:
    class Forgetful(SnapshotRestore):
        def spoil(self, snapshots: Snapshots) -> None:
            latest = snapshots.latest()
            assert latest is not None
            write(latest.path, {**latest.state, "optimizer": {**latest.state["optimizer"], "state": {}}})

    record = record_of(store, Forgetful(), "train-mlp", Mode.TRAIN)
    assert record.verdict is Verdict.FAIL
    assert any(line.startswith("parameter:") for line in record.why.splitlines())
    assert "its file holds generator, module, optimizer, scaler" in missing(record)


@pytest.mark.slow
def test_the_last_good_snapshot_is_used(store: Store) -> None:
    record = record_of(store, SnapshotDamaged(), "train-mlp", Mode.TRAIN)
    assert record.verdict is Verdict.PASS, record.why
    assert observed(record, "steps taken before it went on") == 1
    assert observed(record, "refused").startswith("step-00000002.snapshot: SHA-256: expected ")


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_kind_of_damage_is_refused(tmp_path: Any, kind: str) -> None:
    snapshots = Snapshots(tmp_path)
    for step in (1, 2):
        path = snapshots.save(step, {"step": step})
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    latest = snapshots.latest()
    assert latest is not None
    assert (latest.step, latest.state["step"], len(latest.refused)) == (1, 1, 1)


def test_undetected_damage_fails(store: Store) -> None:
    class Unseen(SnapshotDamaged):
        """Changes the weights and adjusts the digest."""

        def spoil(self, snapshots: Snapshots) -> None:
            newest = max(snapshots.folder.glob("*.snapshot"))
            state = read(newest)
            state["module"]["fc1.weight"] += 1e-3
            write(newest, state)

    record = record_of(store, Unseen(), "train-mlp", Mode.TRAIN)
    assert record.verdict is Verdict.FAIL
    assert "refused: step-00000002.snapshot alone" in missing(record)
    assert any(line.startswith("parameter:") for line in record.why.splitlines())


def test_a_training_in_the_same_process_fails_the_evidence() -> None:
    technique = SnapshotRestore()
    program = program_of_mlp()
    technique.prepare(program, Mode.TRAIN, CPU)
    program.elsewhere = None
    program.run(Mode.TRAIN)
    evidence = list(technique.evidence(program, None, Mode.TRAIN, CPU))  # type: ignore[arg-type]  # not looked at
    technique.finish()
    assert evidence == [Evidence("trainings that another process went on with >= 1", 0, engaged=False)]


def program_of_mlp() -> Program:
    return Program.of(seeded("train-mlp").problem(1), seed=1)


def test_the_files_are_removed() -> None:
    technique = SnapshotRestore()
    program = program_of_mlp()
    technique.prepare(program, Mode.TRAIN, CPU)
    program.run(Mode.TRAIN)
    left = program.extras[HANDOVER].left
    assert left.exists()
    technique.finish()
    assert not left.exists()


@pytest.mark.slow
def test_the_other_process_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "ContinuationProcess", ContinuationProcess)
    technique = SnapshotRestore()
    program = program_of_mlp()
    technique.prepare(program, Mode.TRAIN, CPU)
    program.run(Mode.TRAIN)
    report = program.extras[HANDOVER].report
    os.kill(report.pid, 0)  # the process is alive
    technique.finish()
    with pytest.raises(ProcessLookupError):
        os.kill(report.pid, 0)


def test_programs_that_cannot_be_sent_are_an_error() -> None:
    technique = SnapshotRestore()
    program = Program.of(mlp())
    lock = threading.Lock()
    program.loss = lambda out, _: out.sum() if lock else out
    technique.prepare(program, Mode.TRAIN, CPU)
    try:
        with pytest.raises(TypeError, match=r"cannot be sent to another process.*at the top of a module"):
            program.run(Mode.TRAIN)
    finally:
        technique.finish()


def test_without_a_snapshot_resuming_is_an_error(tmp_path: Any) -> None:
    given = Handover(program_of_mlp(), Mode.TRAIN, CPU)
    with pytest.raises(ChildError, match=r"raised FileNotFoundError: .*expected a snapshot to continue from"):
        given.go_on(Snapshots(tmp_path), 4)
    given.close()


def test_states_are_compared_bit_by_bit() -> None:
    first = {"a": [torch.zeros(2), {"b": 1.0}], "c": (1, "x"), "d": None}
    assert unlike(first, copy.deepcopy(first)) == []
    assert unlike(first, {**first, "a": [torch.tensor([0.0, 1e-30]), {"b": 1.0}]}) == ["a[0]"]
    assert unlike(first, {**first, "a": [torch.zeros(2, dtype=torch.float64), {"b": 2.0}]}) == ["a[0]", "a[1]['b']"]
    assert unlike(first, {**first, "c": (1,), "d": 0}) == ["c", "d"]
    assert unlike(first, {key: value for key, value in first.items() if key != "c"}) == ["c"]
    assert unlike({"n": 1}, {"n": 1.0}) == ["n"]
    assert unlike({"t": torch.zeros(1)}, {"t": 0.0}) == ["t"]


def test_only_deterministic_devices_must_repeat_bits() -> None:
    states = [{"x": torch.tensor(float(number))} for number in range(4)]
    entry = repeated("same", states[0], iter(states[1:]).__next__, StubDevice())
    assert (entry.engaged, entry.observed) == (True, "not comparable: two undisturbed trainings differ too")
    entry = repeated("same", states[0], lambda: states[1], StubDevice())
    assert (entry.engaged, entry.observed) == (False, "1, x first")
    entry = repeated("same", states[0], iter(states[1:]).__next__, StubDevice(features=("deterministic",)))
    assert (entry.engaged, entry.observed) == (False, "1, x first")
    entry = repeated("same", states[0], lambda: states[0], StubDevice())
    assert (entry.engaged, entry.observed) == (True, 0)


@pytest.mark.parametrize("technique", [SnapshotRestore(), SnapshotDamaged()], ids=lambda technique: technique.name)
def test_capability_by_device(technique: SnapshotRestore, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda", "xla", "privateuseone"):
        assert technique.capability(StubDevice(kind)).ok
    monkeypatch.setattr(Xla, "client", "TPU")
    for device in (Tpu(), Xla()):
        capability = technique.capability(device)
        assert (capability.verdict, capability.code) == (Verdict.UNSUPPORTED, Code.NO_FEATURE)
    assert not technique.accepts(workload("linear"))


def test_a_device_without_fp16_autocast_gets_no_scaler() -> None:
    technique = SnapshotRestore()
    program = program_of_mlp()
    technique.prepare(program, Mode.TRAIN, StubDevice(features=("strided",)))
    technique.finish()
    assert program.scaler is None
