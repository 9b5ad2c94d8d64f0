"""Snapshots in files: another process continues from one with the same result, and a damaged one is refused."""

import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Holding, Technique
from accelcheck.techniques.observe import Log, unwatched
from accelcheck.techniques.processes.evidence import repeated, shareable
from accelcheck.techniques.snapshots.files import Snapshots, read
from accelcheck.techniques.snapshots.handover import ContinuationReport, Handover
from accelcheck.techniques.snapshots.stepwise import StepwiseTraining
from accelcheck.workloads.base import Program, Result
from accelcheck.workloads.states import pack, unpack
from accelcheck.workloads.trainer import Recipe, Trainable, Trainer

HANDOVER = "handover"
"""Key in `Program.extras` of the `Handover` of a program."""

SCALE = 2.0**7
INTERVALS: Mapping[Mode, int] = MappingProxyType({Mode.TRAIN: 3, Mode.TRAJECTORY: 10})
"""Growth intervals of the gradient scaler, in steps. It grows after clean steps on both sides of the stop; not within
the first 4 of a long training, where the check of scalers wants its own scale."""


class Relay(Trainer):
    """Takes the first half of the steps; another process takes the rest, from a file, to the result of one process."""

    def __init__(self, recipe: Recipe, handover: Handover) -> None:
        super().__init__(recipe)
        self.handover = handover

    def train(self, program: Trainable) -> Result:
        handover, steps = self.handover, program.steps
        self.step = 0
        with unwatched():
            handover.began = unpack(self.start or pack(self.state(program, self.parts(program))))
        program.steps = half = steps // 2
        try:
            result = super().train(program)
        finally:
            program.steps = steps
        snapshots = handover.snapshots()
        wanted = frozenset(filter(self.records, range(self.step + 1, self.step + 1 + steps - half)))
        with unwatched():
            snapshots.save(self.step, unpack(self.save(program)))
            last = handover.go_on(snapshots, steps - half, wanted)
        if self._parts is None:
            raise TypeError("a training left no parts")
        self.load(program, self._parts, last["training"])
        self._parts.generator = last["training"]["generator"]
        self.scales |= last["scales"]
        place = next(program.module.parameters()).device
        return result | {path: tensor.to(place) for path, tensor in last["result"].items()}


class SnapshotRestore(Holding):
    """Training that stops half way, and that another process continues from a file."""

    name = "snapshot-restore"
    family = "snapshot"
    timed = False
    promise = "A training that another process goes on with from a file ends bitwise as it does without the stop."
    source = "https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html"
    level = 2
    modes = frozenset({Mode.TRAIN, Mode.TRAJECTORY})
    capability = staticmethod(shareable)
    requires = frozenset({"training"})

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        handover = Handover(program, mode, device)
        self.held.callback(handover.close)
        program.extras[HANDOVER] = handover
        program.resets.append(handover.reset)
        program.scaler = _scaler(device, mode)
        if mode is Mode.TRAIN:
            program.elsewhere = self.train
        elif program.trainer is not None:
            program.trainer = Relay(program.trainer.recipe, handover)

    def train(self, program: Program, mode: Mode) -> Result:
        """Takes half of the steps here, with a snapshot after each, the rest elsewhere: see `Program.elsewhere`."""
        handover: Handover = program.extras[HANDOVER]
        program.scaler = _scaler(handover.device, mode)
        session = StepwiseTraining(program)
        snapshots = handover.snapshots()
        with unwatched():
            handover.began = unpack(pack(session.state()))
        while session.step < program.steps // 2:
            session.take()
            with unwatched():
                snapshots.save(session.step, session.state())
        self.spoil(snapshots)
        with unwatched():
            last = handover.go_on(snapshots, program.steps)
        session.load(last["training"])
        return session.result()

    def spoil(self, snapshots: Snapshots) -> None:
        """Changes the files before the other process reads them; not at all by default."""

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        handover: Handover = program.extras[HANDOVER]
        report, left = handover.report, handover.left
        if report is None or left is None:
            yield Evidence("trainings that another process went on with >= 1", 0, engaged=False)
            return
        own = os.getpid()
        yield Evidence(f"process that went on is another than {own}", report.pid, engaged=report.pid not in {0, own})
        yield Evidence(f"operators that it computed on {device.type} >= 1", report.operators, report.operators >= 1)
        yield Evidence.stayed(report.strays, device.name, "there")
        stop = self.used(program.steps // 2)
        claim = f"steps taken before it went on = {stop} of {program.steps}"
        yield Evidence(claim, report.step, engaged=report.step == stop > 0)
        least = sum(parameter.nbytes for parameter in program.module.parameters())
        held, size = read(left), left.stat().st_size
        yield Evidence(f"bytes of its file > {least}, those of the parameters", size, engaged=size > least)
        remembers = handover.ended.get("optimizer", {}).get("state")  # SGD without momentum has none
        wanted = {"module", "generator"} | ({"optimizer"} if remembers else set())
        wanted |= set() if program.scaler is None else {"scaler"}
        wanted |= {"schedule", "loader"} if mode is Mode.TRAJECTORY else set()
        full = {key for key in wanted if _holds(held, key)}
        yield Evidence(f"its file holds {', '.join(sorted(wanted))}", ", ".join(sorted(full)), engaged=full == wanted)
        if handover.compared:  # with a training without a stop, which takes as long as the judged one
            return
        handover.compared = True
        claim = "parts of the state at the end that differ from those without a stop = 0"
        yield repeated(claim, handover.ended, lambda: handover.straight(program.steps), device)

    def used(self, stop: int) -> int:
        """Returns the steps in the snapshot that is continued, when the training stopped after `stop`."""
        return stop


class SnapshotDamaged(SnapshotRestore):
    """Training whose newest snapshot is damaged: the one before is used, and the steps since are taken again."""

    name = "snapshot-damaged"
    workloads = frozenset({"train-mlp", "train-transformer"})  # it is about the file, whatever that holds
    promise = "A damaged snapshot is refused and named; the training goes on from the last good one and ends the same."
    source = "https://docs.pytorch.org/docs/stable/generated/torch.load.html"
    modes = frozenset({Mode.TRAIN})

    def spoil(self, snapshots: Snapshots) -> None:
        newest = snapshots.latest()
        if newest is None:
            raise FileNotFoundError(f"{snapshots.folder}: expected a snapshot to damage")
        # The folders of a case are numbered: its trainings go through all kinds of damage.
        damage = [*DAMAGES.values()][int(snapshots.folder.name) % len(DAMAGES)]
        newest.path.write_bytes(damage(newest.path.read_bytes()))

    def used(self, stop: int) -> int:
        return stop - 1

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        report: ContinuationReport | None = program.extras[HANDOVER].report
        refused = () if report is None else report.refused
        newest = f"step-{program.steps // 2:08}.snapshot"
        seen = "; ".join(f"{name}: {wrong}" for name, wrong in refused)
        yield Evidence(f"refused: {newest} alone", seen or "none", engaged=[name for name, _ in refused] == [newest])


def _scaler(device: Device, mode: Mode) -> torch.amp.GradScaler | None:
    """Makes a gradient scaler where there is one; elsewhere a training has none to lose."""
    if not device.has("autocast-float16"):
        return None
    return torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=INTERVALS[mode])


def _holds(state: Mapping[str, Any], key: str) -> bool:
    """Returns whether there is something under a key; an optimizer that remembers nothing was never used."""
    value = state.get(key)
    return bool(value["state"]) if key == "optimizer" and value else value is not None


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) * 2 // 3],
    "one bit flipped": _flipped,
    "empty": lambda content: b"",  # noqa: ARG005 - of any content
}
"""Damages of a file, by name."""

TECHNIQUES: tuple[Technique, ...] = (SnapshotRestore(), SnapshotDamaged())
