"""Runs one case in the process of the cases: capability, workload, oracle, technique, verdict.

Limits, baselines and ledgers are unknown here: `accelcheck.checks.supervisor` applies them in pytest's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch

from accelcheck.checks import accuracy, numerics, randomness, speed, trajectory
from accelcheck.checks.platform import items, modes
from accelcheck.checks.remarks import REMARKS
from accelcheck.checks.trial import MOST_FAULTS, Clock, Finding, Trial, forget
from accelcheck.core import imports
from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.core.case import Case, Figure, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.files import file_name
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.core.plain import text
from accelcheck.devices.base import Device, Status
from accelcheck.devices.packages import version
from accelcheck.devices.torch_names import SUPPORTED_TORCH, UnknownTorchError
from accelcheck.expectations.chips import TRIED, ChipStatement, held, load
from accelcheck.measure.paired import Comparison
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.accuracy import UndecidedError
from accelcheck.verify.cache import clean_process, compute
from accelcheck.verify.known_answers import KnownAnswerError
from accelcheck.verify.oracle import Store
from accelcheck.verify.reference import OracleError

CHECKS: Mapping[Mode, Callable[[Trial], Finding]] = MappingProxyType(
    {
        **dict.fromkeys((Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN), numerics.verify),
        Mode.TRAJECTORY: trajectory.verify,
        Mode.RANDOM: randomness.verify,
        **dict.fromkeys((Mode.ACCURACY, Mode.LEARNING), accuracy.verify),
        **dict.fromkeys((Mode.SPEED, Mode.TRAIN_SPEED), speed.verify),
        Mode.PLATFORM: items.verify,
        Mode.PLATFORM_SPEED: modes.verify,
    }
)
"""Check by the mode of the case."""

LINES = 20
"""Longest exception text kept, in lines."""
MOST_ERROR = 10_000
"""Longest exception text kept, in characters."""
_QUEUES = "device_ready_queues_"
TOO_EARLY = (
    "(autograd was used in this process, or the one that it was forked from, before the device was: torch counts the "
    "devices then. Compute no gradient before accelcheck does, use the device first, or give the model to accelcheck "
    "check)"
)
"""Explanation of torch's assertion about its device queues."""


@dataclass
class Bench:
    """Techniques, workloads and devices that cases are run with, and the probe's answer for each device.

    `store` has the references of this run, and `traces` is the folder for traces of timed cases.
    """

    matrix: Matrix
    devices: Mapping[str, Device]
    statuses: Mapping[str, Status]
    store: Store
    traces: Path | None = None
    _opened: set[str] = field(default_factory=set)
    _stated: dict[str, tuple[ChipStatement, ...]] = field(default_factory=dict)

    def begin(self) -> Bench:
        """Returns this bench with a process that computes references; called in the process of the cases."""
        clean = clean_process(self.matrix.parts())
        if torch.get_num_threads() > 1:
            compute()  # a fork that hangs here is not used
        return replace(self, store=Store(self.store.cache.folder, clean, self.store.word))

    def close(self) -> None:
        """Ends the process that computes references, if there is one."""
        if self.store.cache.clean is not None:
            self.store.cache.clean.close()

    def trial(self, case: Case) -> Trial:
        """Returns a case with the technique, workload and device that it names."""
        technique, workload = self.matrix.techniques[case.technique], self.matrix.workloads[case.workload]
        return Trial(case, technique, workload, self.devices[case.device], self.store)

    def run(self, case: Case) -> Record:
        """Runs a case and returns its record, whatever it raises; no limit, baseline or ledger is applied yet."""
        clock = Clock()
        try:
            record = self._run(case, clock)
        except Unsupported as answer:
            record = _refused(case, answer.capability)
            if answer.__cause__ is not None and (silent := self._silent(case.device)):
                record = Record(case, Verdict.DEVICE_LOST, reason=f"{silent}\n{record.reason}")
        except UnknownTorchError as error:
            record = _refused(case, unavailable(Code.WRONG_VERSION, str(error), f"install torch {SUPPORTED_TORCH}"))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything: it is this case's error
            owned = self.matrix.workloads[case.workload].owned
            undecided = owned and isinstance(error, OracleError | UndecidedError)
            code = ErrorCode.UNDECIDED if undecided else ""
            first, *rest = _brief(error).splitlines()
            reason = "\n".join([first + (_place(error) if owned and not undecided else ""), *rest])
            record = Record(case, Verdict.ERROR, code=code, reason=reason, traceback=_traceback(error))
            forget(error)
            if silent := self._silent(case.device):
                record = replace(record, verdict=Verdict.DEVICE_LOST, code="", reason=f"{silent}\n{record.reason}")
        if record.code == ErrorCode.NOTHING_COMPARED and self.matrix.workloads[case.workload].owned:
            record = replace(record, code=ErrorCode.UNDECIDED)
        record = replace(record, seconds=clock.seconds)
        return held(record, self._statements(case.device), version("torch"))

    def _silent(self, name: str) -> str:
        """Returns the reason why a device has stopped computing; empty if it computes."""
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
        """Times a case beside FP32 eager without judging it; returns the reason where it cannot be timed."""
        try:
            capability = self._capability(case)
            if not capability.ok:
                return str(capability)
            trial = self.trial(case)
            with _restored(trial, []):
                return speed.ratio(trial, (speed.PROCESS_SECONDS,), error=speed.PROCESS_ERROR)
        except Unsupported as answer:
            return str(answer.capability)
        except Exception as error:  # noqa: BLE001 - the judging process reports the error
            return _brief(error)

    def _run(self, case: Case, clock: Clock) -> Record:
        capability = self._capability(case)
        if not capability.ok:
            return _refused(case, capability)
        trace = None
        if self.traces is not None and case.timed:
            self.traces.mkdir(parents=True, exist_ok=True)
            trace = self.traces / f"{file_name(case.id)}.json"
        trial = replace(self.trial(case), clock=clock, trace=trace)
        left: list[Fault] = []
        try:
            with _restored(trial, left):
                finding = CHECKS[case.mode](trial)
        except Exception as error:
            for fault in left:
                error.add_note(str(fault))
            raise
        return _record(case, replace(finding, faults=[*finding.faults, *left]))

    def _capability(self, case: Case) -> Capability:
        device, status = self.devices[case.device], self.statuses[case.device]
        if not status.present:
            return status.capability
        self._open(device)
        if case.dtype not in device.dtypes:
            return device.lacks(case.dtype, Code.NO_DTYPE)
        features = self.matrix.workloads[case.workload].features
        return self.matrix.techniques[case.technique].answer(device, *sorted(features))

    def _open(self, device: Device) -> None:
        """Opens a device once per process. The exactness of its FP32 is a case of its own, `strict-float32`."""
        if device.name not in self._opened:
            imports.load()
            device.open()
            # Autograd counts the devices at its first use, which may be the oracle's on the CPU.
            torch.ones(1, device=device.torch_device()).add_(1)
            device.synchronize()
            self._opened.add(device.name)

    def _statements(self, name: str) -> tuple[ChipStatement, ...]:
        if name not in self._stated:
            if name not in self._opened:  # an absent or lost device cannot be asked
                return ()
            self._stated[name] = load(self.devices[name].architecture())
        return self._stated[name]


@contextlib.contextmanager
def _restored(trial: Trial, left: list[Fault]) -> Iterator[None]:
    """Finishes the technique and restores global state that it left changed; adds a fault to `left` for each change."""
    try:
        yield
    except KnownAnswerError as error:
        for fault in trial.state.differences():  # state that could not be restored, such as a kernel
            error.add_note(str(fault))
        raise
    finally:
        try:
            trial.technique.finish()
        finally:
            left += trial.state.restore()


def _brief(error: BaseException) -> str:
    """Returns type and text of an exception, cut to `LINES` lines: some libraries print whole tensors."""
    lines = f"{type(error).__name__}: {text(error, MOST_ERROR)}".splitlines()
    advice = [TOO_EARLY] if any(_QUEUES in line for line in lines) else []
    more = len(lines) - LINES
    cut = [*lines[:LINES], f"({more} more lines)"] if more > 0 else lines
    return "\n".join([*cut, *advice, *getattr(error, "__notes__", ())])


def _place(error: BaseException) -> str:
    """Returns the innermost line of a user's own file that an exception passed; empty without one."""
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if not f.filename.startswith((ours, "<")) and f"{os.sep}lib{os.sep}python" not in f.filename
    ]
    return f" (in {own[-1].name}, {Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _traceback(error: BaseException) -> str:
    """Returns frames and text of an exception and of those that led to it, the oldest first."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    led = f"{_traceback(before)}which led to\n" if before is not None else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{led}Traceback (most recent call last):\n{frames}{_brief(error)}\n"


def _record(case: Case, finding: Finding) -> Record:
    verdict, code, reason = Verdict.PASS, "", ""
    if finding.wrong:
        verdict = Verdict.FAIL
    elif sum(e.seen and e.claim not in REMARKS for e in finding.evidence) < 2:  # the engine adds one about the device
        verdict, code = Verdict.ERROR, ErrorCode.NO_EVIDENCE
        reason = f"{case.technique} gave no evidence that it ran: a verdict needs some"
    elif finding.undecided:
        verdict, code = Verdict.ERROR, ErrorCode.NOTHING_COMPARED
        reason = finding.undecided
    elif finding.implausible:
        verdict, code = Verdict.ERROR, ErrorCode.IMPLAUSIBLE
        reason = f"what was timed cannot have done the work: {finding.implausible}"
    return Record(
        case=case,
        verdict=verdict,
        code=code,
        reason=reason,
        evidence=tuple(finding.evidence),
        figures=_telling(finding.figures),
        compared=finding.compared,
        eager_excess=finding.eager_excess,
        measurements=tuple(finding.measurements) if verdict is Verdict.PASS else (),
        digest=finding.digest,
        times=tuple(finding.times),
        remark="; ".join(f"{e.claim}: {e.observed}" for e in finding.evidence if not e.seen),
        faults=_kept(finding.wrong),
        refused=finding.refused,
    )


def _kept(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Cuts faults to `MOST_FAULTS`, and then adds one that counts the rest, which no ledger expects."""
    more = len(faults) - MOST_FAULTS
    return (*faults[:MOST_FAULTS], Fault(FaultKind.OTHER, f"{more} more faults")) if more > 0 else faults


def _telling(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Keeps the figure closest to its budget per view, and the gating one furthest beyond it per path and view."""
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


def recorded(bench: Bench, case: Case) -> str:
    """Returns the record of a case as JSON for another process, whatever the case raises."""
    try:
        record = bench.run(case)
    except BaseException as error:  # noqa: BLE001 - `sys.exit` or `pytest.skip` would end the run
        record = Record(case, Verdict.ERROR, reason=f"{type(error).__name__}: {text(error)}")
    # JSON, because the other process may be unable to unpickle a record.
    return json.dumps(record.as_json())
