"""Handover of a training that stops to another process, which continues it from a folder with snapshots alone."""

import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accelcheck.core import imports
from accelcheck.core.case import Mode
from accelcheck.core.files import scratch
from accelcheck.core.processes import Child, ChildError, Mailbox, calling
from accelcheck.devices.base import Device
from accelcheck.techniques.observe import OperatorLog, unwatched
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.techniques.snapshots.files import Snapshots, read
from accelcheck.techniques.snapshots.stepwise import StepwiseTraining
from accelcheck.workloads.base import Problem, Program, Result
from accelcheck.workloads.states import pack, unpack

PATIENCE = 300.0
"""Seconds for the other process to continue to the end; the first time it also imports torch, and may compile."""
SEED = 20231
"""Seed of the other process's generators before it loads, which shows whether the snapshot restores them."""


@dataclass(frozen=True)
class ContinuationTask:
    """Task of the other process: continue a training, whose state is in the snapshots of a folder.

    The problem is on the CPU, with NaN as parameters; `scaled` tells of a gradient scaler. Sums depend on the number of
    torch's `threads`. A long training records its parameters after the steps in `records`.
    """

    problem: Problem
    device: Device
    dtype: torch.dtype
    seed: int
    mode: Mode
    scaled: bool
    threads: int
    folder: Path
    records: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ContinuationReport:
    """Report of the other process, which continued from the snapshot `used`, of `step` steps, to the state in `last`.

    `refused` names damaged snapshots, each with its damage. `operators` counts those that it dispatched on the device,
    `strays`, by name, those that left the device for the CPU.
    """

    pid: int
    used: str
    step: int
    refused: tuple[tuple[str, str], ...]
    operators: int
    strays: Mapping[str, int]
    last: Path


class ContinuationProcess:
    """Process with its own interpreter, which starts at once and continues any number of trainings."""

    def __init__(self, device: Device) -> None:
        self._asked = 0
        self._held = ExitStack()
        folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="handover-", dir=scratch())))
        self._mailbox = Mailbox(folder)
        self._mailbox.put("device", device)
        self._child = self._held.enter_context(Child(calling(f"{__name__}:main", folder, parent=True)))

    def go_on(self, errand: ContinuationTask) -> ContinuationReport:
        """Continues a training to its end.

        Raises `ChildError` if the process raised, ended or was too slow, a TypeError if the errand cannot be pickled.
        """
        number = self._asked
        self._mailbox.put(f"errand-{number}", errand)
        self._asked += 1
        box, child = self._mailbox, self._child
        reports = box.wait([f"report-{number}"], PATIENCE, lambda: bool(box.errors()) or not child.running)
        if reports is None:
            who = "the process that was to continue a training"
            for _, brief, trace in box.errors()[-1:]:
                box.remove(f"raised-{number}")
                raise ChildError(f"{who} raised {brief}\n{trace}")
            how = f"was silent for {PATIENCE:g} s" if child.running else child.wait()
            raise ChildError(f"{who} {how}; its last output:\n{child.last()}")
        report: ContinuationReport = reports[0]
        return report

    def close(self) -> None:
        """Ends the process."""
        self._held.close()


class Handover:
    """Hands the trainings of one program over to another process, and keeps observations of the last one.

    `began` and `ended` are the states of the last training before its first and after its last step, `left` its newest
    intact snapshot, `report` that of the other process. `compared` is True once one was compared with one without stop.
    """

    def __init__(self, program: Program, mode: Mode, device: Device) -> None:
        self.program, self.mode, self.device = program, mode, device
        self._scratch = tempfile.TemporaryDirectory(prefix="files-", dir=scratch())
        self._other = ContinuationProcess(device)
        self._count = 0
        self.began: Mapping[str, Any] = {}
        self.ended: Mapping[str, Any] = {}
        self.left: Path | None = None
        self.report: ContinuationReport | None = None
        self.compared = False

    def reset(self) -> None:
        """Forgets the last training."""
        self.report = self.left = None

    def snapshots(self) -> Snapshots:
        """Makes an empty folder for the next training."""
        self._count += 1
        return Snapshots(Path(self._scratch.name) / str(self._count))

    def go_on(self, snapshots: Snapshots, steps: int, records: frozenset[int] = frozenset()) -> dict[str, Any]:
        """Lets the other process continue from the newest intact snapshot: up to `steps`, or by them (trajectory mode).

        Returns ``training`` (the state at the end), ``result`` and ``scales``; tensors are on the CPU.
        """
        report = self._other.go_on(self._errand(snapshots.folder, steps, records))
        self.report, self.left = report, snapshots.folder / report.used
        last = read(report.last)
        self.ended = last["training"]
        return last

    def straight(self, steps: int, records: frozenset[int] = frozenset()) -> dict[str, Any]:
        """Lets the other process repeat the last training without a stop; returns the state at its end."""
        snapshots = self.snapshots()
        snapshots.save(0, self.began)
        report = self._other.go_on(self._errand(snapshots.folder, steps, records))
        training: dict[str, Any] = read(report.last)["training"]
        return training

    def close(self) -> None:
        """Ends the other process and removes the files."""
        self._other.close()
        self._scratch.cleanup()

    def _errand(self, folder: Path, steps: int, records: frozenset[int]) -> ContinuationTask:
        problem = replace(self.program.problem(), steps=steps)
        dtype = next(problem.module.parameters()).dtype
        with torch.no_grad():
            for tensor in problem.module.state_dict().values():  # not of buffers that no state has
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        scaled, seed, threads = self.program.scaler is not None, self.program.seed, torch.get_num_threads()
        return ContinuationTask(problem, self.device, dtype, seed, self.mode, scaled, threads, folder, records)


def main(arguments: Sequence[str]) -> None:
    """Runs the other process: opens the device while the parent is still busy, then does one errand after the other."""
    mailbox = Mailbox(Path(arguments[0]))
    imports.load()
    mailbox.take("device").open()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports what an errand needs
    for number in itertools.count():
        errand = mailbox.coming(f"errand-{number}")
        try:
            mailbox.put(f"report-{number}", _go_on(errand))
        except Exception as error:  # noqa: BLE001 - a workload or backend may raise anything: the parent reports it
            mailbox.raised(number, error)


def _go_on(errand: ContinuationTask) -> ContinuationReport:
    device = errand.device
    torch.set_num_threads(errand.threads)
    device.open()
    device.seed(SEED)
    latest = Snapshots(errand.folder).latest()
    if latest is None:
        raise FileNotFoundError(f"{errand.folder}: expected a snapshot to continue from, got none")
    with device.strict_float32():
        program = program_on(device, errand.problem, errand.dtype, errand.seed)
        if errand.scaled:
            program.scaler = torch.amp.GradScaler(device.type)
        device.reset_fallbacks()
        with OperatorLog(device.type) as log:  # as in the first part: on XLA a dispatch mode changes the rounding
            train = _trained if errand.mode is Mode.TRAIN else _long
            last = train(program, latest.state, errand)
            device.synchronize()
    used = log.having(lambda operator: any(at == device.type for _, _, at in operator.outputs))
    path = Snapshots(errand.folder / "last").save(latest.step, last)
    refused = tuple((error.path.name, error.wrong) for error in latest.refused)
    strays = dict(log.strays()) | dict(device.fallbacks())
    return ContinuationReport(os.getpid(), latest.path.name, latest.step, refused, used, strays, path)


def _trained(program: Program, state: Mapping[str, Any], errand: ContinuationTask) -> dict[str, Any]:
    session = StepwiseTraining(program)
    session.load(state)
    while session.step < program.steps:
        session.take()
    return {"training": session.state(), "result": {}, "scales": {}}


def _long(program: Program, state: Mapping[str, Any], errand: ContinuationTask) -> dict[str, Any]:
    trainer = program.trainer
    if trainer is None:
        raise TypeError("a long training needs a recipe: give the Problem one")
    trainer.records = errand.records.__contains__
    trainer.start = pack(state)
    result: Result = trainer.train(program)
    with unwatched():
        return {"training": unpack(trainer.save(program)), "result": result, "scales": trainer.scales}
