"""Runs one case: capability, workload, oracle, technique, verdict."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from accelcheck.checks import accuracy, numerics, randomness, speed, trajectory
from accelcheck.checks.platform import items, modes
from accelcheck.checks.trial import REMARKS, Clock, Finding, Trial
from accelcheck.core import imports
from accelcheck.core.capability import Capability, Code, unavailable, unsupported
from accelcheck.core.case import Case, Figure, Mode, Verdict
from accelcheck.core.files import file_name
from accelcheck.core.journal import Record
from accelcheck.core.plain import text
from accelcheck.devices.packages import version
from accelcheck.devices.torch_names import SUPPORTED_TORCH, UnknownTorchError
from accelcheck.expectations.chips import TRIED, ChipStatement, held, load
from accelcheck.expectations.ledger import foreseen, outgrown
from accelcheck.techniques.base import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from accelcheck.checks.supervisor import Supervisor
    from accelcheck.devices.base import Device, Status
    from accelcheck.expectations.ledger import Ledger
    from accelcheck.measure.gate import Gate
    from accelcheck.measure.paired import Comparison
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.matrix import Matrix
    from accelcheck.verify.oracle import Store

CHECKS: Mapping[Mode, Callable[[Trial], Finding]] = MappingProxyType(
    {
        Mode.FORWARD: numerics.verify,
        Mode.BACKWARD: numerics.verify,
        Mode.TRAIN: numerics.verify,
        Mode.TRAJECTORY: trajectory.verify,
        Mode.RANDOM: randomness.verify,
        Mode.ACCURACY: accuracy.verify,
        Mode.LEARNING: accuracy.verify,
        Mode.SPEED: speed.verify,
        Mode.TRAIN_SPEED: speed.verify,
        Mode.PLATFORM: items.verify,
        Mode.PLATFORM_SPEED: modes.verify,
    }
)
"""The check that finds the verdict of a case, by the case's mode."""

AGAIN = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST})
"""Verdicts of cases that are run again, in another process."""
RUNS = 3
"""Most runs of such a case: two, and a third where they differ, so that its rate is known a little."""
LINES = 20
"""Lines that are kept of an exception's text, and of a failure that is expected."""
MOST_ERROR = 10_000
"""Characters of it."""


_QUEUES = "device_ready_queues_"
TOO_EARLY = (
    "(autograd was used in this process, or the one that it was forked from, before the device was: torch counts the devices then. Compute no "
    "gradient before accelcheck does, use the device first, or give the model to accelcheck check)"
)
"""What torch's assertion about its queues of devices means."""


@dataclass
class Bench:
    """What cases are run with: all techniques, workloads and devices, and which devices are present.

    Attributes:
        matrix: Techniques and workloads by name.
        devices: Devices by name.
        statuses: What the probe found, by device name.
        store: References of this run.
        ledger: Known failures.
        gate: Holds measurements against baselines and limits; None where neither was asked for.
        traces: Folder for traces of timed cases.
        elsewhere: Runs the cases in another process; None for this one.
    """

    matrix: Matrix
    devices: Mapping[str, Device]
    statuses: Mapping[str, Status]
    store: Store
    ledger: Ledger
    gate: Gate | None = None
    traces: Path | None = None
    elsewhere: Supervisor | None = None
    _opened: set[str] = field(default_factory=set)
    _stated: dict[str, tuple[ChipStatement, ...]] = field(default_factory=dict)

    def run(self, case: Case) -> Record:
        """Find the verdict of one case. An exception that the case raises becomes its record and is not raised again."""
        timed = self.gate.timed.get(case.id) if self.gate is not None else None
        if timed is not None and timed.ended is not None:  # it would do the same to this process
            return self.expect(Record(case, timed.ended, reason=timed.reason))
        record = self._judged(case)
        if self.elsewhere is not None and record.verdict in AGAIN and not case.timed:
            record = self._again(record, self.elsewhere)
        return record if self.gate is None else self.gate.keep(record)

    def _judged(self, case: Case) -> Record:
        if self.elsewhere is None:
            record = self.found(case)
        else:
            record = self.elsewhere.run(case, self.matrix.techniques[case.technique].patience)
        # A regression may be known too, and what the ledger says fails is not stored when it passes.
        return self.expect(record if self.gate is None else self.gate.judge(record))

    def _again(self, first: Record, elsewhere: Supervisor) -> Record:
        """A case that failed once more, in another process: one that passes then is `flaky`."""
        runs = [first]
        while len(runs) < RUNS and (len(runs) == 1 or any(record.verdict.green for record in runs)):
            elsewhere.renew()
            runs.append(self._judged(first.case))
        if not runs[-1].verdict.green:
            elsewhere.renew()  # what it has spoilt there is no matter of the next case
        wrong = [record for record in runs if not record.verdict.green]
        if len(wrong) == len(runs):
            return first
        reason = f"{len(wrong)} of {len(runs)} runs were not right; the first one: {first.verdict}\n{first.reason}"
        return replace(first, verdict=Verdict.FLAKY, reason=reason)

    def found(self, case: Case) -> Record:
        """What a case shows, in this process: before limits, baselines and the ledger are asked."""
        clock = Clock()
        try:
            record = self._run(case, clock)
        except Unsupported as answer:
            record = _refused(case, answer.capability)
        except UnknownTorchError as error:
            record = _refused(case, unavailable(Code.WRONG_VERSION, str(error), f"install torch {SUPPORTED_TORCH}"))
        except Exception as error:  # noqa: BLE001 - a workload, technique or backend may raise anything: it is this case's error
            record = Record(case, Verdict.ERROR, reason=_brief(error), traceback=_traceback(error))
            if silent := self._silent(case.device):
                record = replace(record, verdict=Verdict.DEVICE_LOST, reason=f"{silent}\n{record.reason}")
        record = replace(record, seconds=clock.seconds)
        return held(record, self._statements(case.device), version("torch"))

    def _silent(self, name: str) -> str:
        """Why a device that was found at the start does not compute any more; empty where it does."""
        device = self.devices[name]
        try:
            self._open(device)
            with torch.no_grad():
                answer = (torch.ones(2, device=device.torch_device()) + 1).cpu().tolist()
            device.synchronize()
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            return f"{name} does not answer any more: {_brief(error)}"
        return "" if answer == [2.0, 2.0] else f"{name} does not answer any more: expected 1 + 1 to be 2, got {answer}"

    def ratio(self, case: Case) -> Comparison | str:
        """Time a case beside FP32 eager, without judging it; the reason, as text, where it cannot be timed."""
        technique, device = self.matrix.techniques[case.technique], self.devices[case.device]
        try:
            capability = self._capability(case, technique, device)
            if not capability.ok:
                return str(capability)
            trial = Trial(case, technique, self.matrix.workloads[case.workload], device, self.store)
            with _restored(trial, []):
                return speed.ratio(trial, (speed.PROCESS_SECONDS,), error=speed.PROCESS_ERROR)
        except Unsupported as answer:
            return str(answer.capability)
        except Exception as error:  # noqa: BLE001 - what raises here has its verdict from the process that judges
            return _brief(error)

    def _run(self, case: Case, clock: Clock) -> Record:
        technique = self.matrix.techniques[case.technique]
        device = self.devices[case.device]
        capability = self._capability(case, technique, device)
        if not capability.ok:
            return _refused(case, capability)
        workload = self.matrix.workloads[case.workload]
        trace = None
        if self.traces is not None and case.timed:
            self.traces.mkdir(parents=True, exist_ok=True)
            trace = self.traces / f"{file_name(case.id)}.json"
        expected = self.ledger.expects(case.id)
        trial = Trial(case, technique, workload, device, self.store, clock, trace, expected=expected)
        left: list[str] = []
        try:
            with _restored(trial, left):
                found = CHECKS[case.mode](trial)
        except Exception as error:
            for line in left:
                error.add_note(line)
            raise
        return _record(case, replace(found, faults=[*found.faults, *left]))

    def _capability(self, case: Case, technique: Technique, device: Device) -> Capability:
        status = self.statuses[case.device]
        if not status.present:
            return status.capability
        self._open(device)
        if case.dtype not in device.dtypes:
            return unsupported(Code.NO_DTYPE, f"{device.name} does not declare {case.dtype}")
        return technique.answer(device, *sorted(self.matrix.workloads[case.workload].features))

    def _open(self, device: Device) -> None:
        """Open a device once a process. Whether its FP32 is FP32 is a case of its own, `strict-float32`."""
        if device.name not in self._opened:
            imports.load()
            device.open()
            # Autograd counts the devices when it is first used, which may be by the oracle, on the CPU.
            torch.ones(1, device=device.torch_device()).add_(1)
            device.synchronize()
            self._opened.add(device.name)

    def expect(self, record: Record) -> Record:
        """Hold a verdict against the ledger."""
        entries = self.ledger.covering(record.case.id)
        if not entries or not record.verdict.executed:
            return record
        if record.verdict is Verdict.PASS:
            reason = "\n".join(f"the ledger expects {e.verdict}: {e.reason}" for e in entries)
            return replace(record, verdict=Verdict.XPASS, reason=f"passes: remove the entry from the ledger\n{reason}")
        # Every fault of a `fail` has a line of its own; what follows the first line of an exception's text is detail.
        lines = record.reason.splitlines()
        judged = lines if record.verdict is Verdict.FAIL else lines[:1]
        causes = foreseen(entries, record.verdict, judged)
        if not causes:
            return replace(record, reason="\n".join([*lines, *outgrown(entries, record.verdict, judged)]))
        reasons = "; ".join(dict.fromkeys(f"{entry.reason} ({entry.link})" for entry in causes))
        return replace(record, verdict=Verdict.XFAIL, reason="\n".join([reasons, *_cut(lines)]), traceback="")

    def _statements(self, name: str) -> tuple[ChipStatement, ...]:
        if name not in self._stated:
            if name not in self._opened:  # what is absent, or died, cannot say what it is
                return ()
            self._stated[name] = load(self.devices[name].architecture())
        return self._stated[name]


@contextlib.contextmanager
def _restored(trial: Trial, left: list[str]) -> Iterator[None]:
    """Finish the technique, and put back what it leaves changed all the same; `left` gets a line for each such thing."""
    try:
        yield
    finally:
        try:
            trial.technique.finish()
        finally:
            left += trial.state.restore()


def _brief(error: BaseException) -> str:
    """Type and text of an exception, cut to `LINES` lines: some libraries print whole tensors."""
    lines = f"{type(error).__name__}: {text(error, MOST_ERROR)}".splitlines()
    advice = [TOO_EARLY] if any(_QUEUES in line for line in lines) else []
    return "\n".join([*_cut(lines), *advice, *getattr(error, "__notes__", ())])


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - LINES
    return [*lines[:LINES], f"({more} more lines)"] if more > 0 else lines


def _traceback(error: BaseException) -> str:
    """Frames and text of an exception and of those that led to it, the first one first."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    led = f"{_traceback(before)}which led to\n" if before is not None else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{led}Traceback (most recent call last):\n{frames}{_brief(error)}\n"


def _record(case: Case, found: Finding) -> Record:
    absent = [f"not engaged: {e.claim}: observed {e.observed}" for e in found.evidence if not e.engaged]
    if found.faults or absent:
        verdict, reason = Verdict.FAIL, "\n".join([*absent, *found.faults])
    elif sum(e.seen and e.claim not in REMARKS for e in found.evidence) < 2:  # the engine adds one about the device
        verdict, reason = Verdict.ERROR, f"{case.technique} gave no evidence that it ran: a verdict needs some"
    elif found.compared == 0:
        verdict, reason = Verdict.ERROR, "no element was compared: a pass needs at least one"
    else:
        verdict, reason = Verdict.PASS, ""
    return Record(
        case=case,
        verdict=verdict,
        reason=reason,
        evidence=tuple(found.evidence),
        figures=_telling(found.figures),
        compared=found.compared,
        eager_excess=found.eager_excess,
        measurements=tuple(found.measurements) if verdict is Verdict.PASS else (),
        digest=found.digest,
        times=tuple(found.times),
        remark="; ".join(f"{e.claim}: {e.observed}" for e in found.evidence if not e.seen),
    )


def _telling(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """For each view the figure closest to its budget, and for each path and view the gating figure furthest beyond its own."""
    closest: dict[str, Figure] = {}
    beyond: dict[tuple[str, str], Figure] = {}
    for figure in figures:
        if figure.view not in closest or figure.used > closest[figure.view].used:
            closest[figure.view] = figure
        key = figure.path, figure.view
        if figure.gates and not figure.within and (key not in beyond or figure.used > beyond[key].used):
            beyond[key] = figure
    return tuple(dict.fromkeys([*closest.values(), *beyond.values()]))


def _refused(case: Case, capability: Capability) -> Record:
    if capability.verdict is None:
        raise ValueError(f"{case.id}: a technique that runs was refused: pass a capability that says why not")
    remark = TRIED if capability.tried and capability.verdict is Verdict.UNSUPPORTED else ""
    return Record(case, capability.verdict, code=str(capability.code), reason=str(capability), remark=remark)
