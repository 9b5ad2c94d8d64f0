"""The way of one case: capability, workload, oracle, technique, verdict. One way, no back and forth."""

from __future__ import annotations

import contextlib
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.capability import Capability, Code, unsupported
from accelcheck.case import Case, Evidence, Figure, Mode, Verdict
from accelcheck.journal import Record
from accelcheck.qualify.ledger import foreseen
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.judge import Contract, check_metadata, judge
from accelcheck.workloads.base import Program, to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from accelcheck.devices.base import Device, Status
    from accelcheck.matrix import Matrix
    from accelcheck.qualify.ledger import Ledger
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.verify.oracle import Reference, Store
    from accelcheck.workloads.base import Result, Workload

FLOAT32_LIMIT = 4 * 2.0**-24
"""Most that the strictness probe may err where FP32 was asked for. Its products and sums are exact in FP32, so 0 is
expected; TF32 errs 2**-11. A few units are left to devices that multiply in split halves."""


LINES = 20
"""Lines that are kept of an exception's text."""


@dataclass
class Bench:
    """What cases are run with: everything known, and what of it is here.

    Attributes:
        matrix: Techniques and workloads by name.
        devices: Devices by name.
        statuses: What the probe found, by device name.
        store: References of this run.
        ledger: Known failures.
    """

    matrix: Matrix
    devices: Mapping[str, Device]
    statuses: Mapping[str, Status]
    store: Store
    ledger: Ledger
    _opened: dict[str, float] = field(default_factory=dict)

    def run(self, case: Case) -> Record:
        """Find the verdict of one case. Whatever goes wrong in it becomes its record; nothing is raised for it."""
        clock = _Clock()
        try:
            record = self._run(case, clock)
        except Unsupported as answer:
            record = _refused(case, answer.capability)
        except Exception as error:  # noqa: BLE001 - a workload, technique or backend may raise anything: it is this case's error
            record = Record(case, Verdict.ERROR, reason=_brief(error), traceback=_traceback(error))
        return self._expect(replace(record, seconds=clock.seconds))

    def _run(self, case: Case, clock: _Clock) -> Record:
        technique = self.matrix.techniques[case.technique]
        workload = self.matrix.workloads[case.workload]
        device = self.devices[case.device]
        capability = self._capability(case, technique, device)
        if not capability.ok:
            return _refused(case, capability)
        with clock("oracle"):
            reference = self.store.get(case, technique, workload)
        try:
            return _verify(case, technique, workload, device, reference, clock)
        finally:
            technique.finish()

    def _capability(self, case: Case, technique: Technique, device: Device) -> Capability:
        status = self.statuses[case.device]
        if not status.present:
            return status.capability
        self._open(device)
        if case.dtype not in device.dtypes:
            return unsupported(Code.NO_DTYPE, f"{device.name} does not declare {case.dtype}")
        return technique.capability(device)

    def _open(self, device: Device) -> None:
        """Open a device once a process, and see by a number that its FP32 is FP32."""
        if device.name not in self._opened:
            device.open()
            with device.strict_float32():
                self._opened[device.name] = device.float32_error()
        if not self._opened[device.name] <= FLOAT32_LIMIT:
            raise RuntimeError(
                f"{device.name}: FP32 matmul errs {self._opened[device.name]:.3g} with reduced precision switched off "
                f"(limit {FLOAT32_LIMIT:.3g}): there is no FP32 on this device to compare with. Look for a variable "
                f"that forces TF32 or bf16: {device.environment() or 'none of the known ones is set'}"
            )

    def _expect(self, record: Record) -> Record:
        """Hold a verdict against the ledger."""
        entries = self.ledger.covering(record.case.id)
        if not entries or not record.verdict.executed:
            return record
        if record.verdict is Verdict.PASS:
            reason = "\n".join(f"the ledger expects {e.verdict}: {e.reason}" for e in entries)
            return replace(record, verdict=Verdict.XPASS, reason=f"passes: remove the entry from the ledger\n{reason}")
        # Every fault of a `fail` has a line of its own; what follows the first line of an exception's text is detail.
        lines = record.reason.splitlines()
        causes = foreseen(entries, record.verdict, lines if record.verdict is Verdict.FAIL else lines[:1])
        if not causes:
            return record
        reasons = "; ".join(f"{entry.reason} ({entry.link})" for entry in causes)
        return replace(record, verdict=Verdict.XFAIL, reason=f"{reasons}\n{record.reason}", traceback="")


def _brief(error: BaseException) -> str:
    """Type and text of an exception, the first lines of it: some libraries print whole tensors."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    more = len(lines) - LINES
    return "\n".join([*lines[:LINES], f"({more} more lines)"] if more > 0 else lines)


def _traceback(error: BaseException) -> str:
    """Frames and text of an exception and of those that led to it, the first one first."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    led = f"{_traceback(before)}which led to\n" if before is not None else ""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{led}Traceback (most recent call last):\n{frames}{_brief(error)}\n"


class _Clock:
    """Wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def _verify(
    case: Case, technique: Technique, workload: Workload, device: Device, reference: Reference, clock: _Clock
) -> Record:
    with device.strict_float32():
        with clock("prepare"):
            program = _program(case, workload, device)
            state = _State(program)
            technique.prepare(program, case.mode, device)
            _warm_up(case, technique, workload, device, program)
            state.restore()
            device.synchronize()
            inputs = [_snapshot(value) for value in program.inputs]
        with clock("run"):
            _poison(reference, device)
            device.seed(case.seed)
            device.reset_fallbacks()
            with technique.watch(device.type) as log:
                result = program.run(case.mode)
            fallbacks = device.fallbacks()
        with clock("judge"):
            evidence = (
                *technique.evidence(program, log, case.mode, device),
                _on_device(log, fallbacks, device),
            )
            dtypes = frozenset({technique.precision(case.dtype)} - {case.dtype})
            contract = Contract(device.type, technique.keeps_strides and "strided" in device.features, dtypes)
            faults, figures, compared = _faults(result, reference, contract)
            faults += _mutations(program, inputs)
            if case.mode is not Mode.TRAIN:
                faults += state.mutations()
    return _record(case, reference, evidence, faults, figures, compared)


def _program(case: Case, workload: Workload, device: Device) -> Program:
    return Program.of(
        workload.problem(case.seed),
        device=device.torch_device(),
        dtype=getattr(torch, case.dtype),
        seed=case.seed,
        synchronize=device.synchronize,
    )


def _warm_up(case: Case, technique: Technique, workload: Workload, device: Device, program: Program) -> None:
    """Run with other inputs, so that what is judged is the steady state and no cache of results can serve it."""
    judged = program.inputs, program.target, program.scaler
    for number in range(1, technique.warmups + 1):
        extent = number if technique.resizing and "resizable" in workload.traits else 0
        other = workload.problem(case.seed + number, extent)
        dtype = getattr(torch, case.dtype)
        program.inputs = tuple(to(value, device.torch_device(), dtype) for value in other.inputs)
        program.target = None if other.target is None else to(other.target, device.torch_device(), dtype)
        program.run(case.mode)
    program.inputs, program.target, program.scaler = judged


class _State:
    """Parameters and buffers as they were, to restore them between runs and to see that nothing changed them."""

    def __init__(self, program: Program) -> None:
        self._tensors = dict(program.module.named_parameters())
        self._buffers = dict(program.module.named_buffers())
        self._before = {name: _snapshot(t) for name, t in (self._tensors | self._buffers).items()}

    def restore(self) -> None:
        """Put the values back, in place, so that what was compiled for these tensors stays valid."""
        with torch.no_grad():
            for name, tensor in (self._tensors | self._buffers).items():
                if not torch.equal(tensor.detach().cpu(), self._before[name]):
                    tensor.copy_(self._before[name].to(tensor.device))

    def mutations(self) -> list[str]:
        """Parameters that a forward or backward pass changed. Buffers are part of the result, and judged there."""
        return [
            f"parameter:{name}: mutated: expected it bitwise unchanged"
            for name, tensor in self._tensors.items()
            if not _unchanged(tensor.detach().cpu(), self._before[name])
        ]


def _snapshot(value: Any) -> Any:
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value


def _mutations(program: Program, before: Sequence[Any]) -> list[str]:
    return [
        f"input[{index}]: mutated: expected it bitwise unchanged"
        for index, (value, was) in enumerate(zip(program.inputs, before, strict=True))
        if isinstance(value, Tensor) and not _unchanged(value.detach().cpu(), was)
    ]


def _unchanged(value: Tensor, was: Tensor) -> bool:
    """Equal everywhere, NaN where NaN was: `torch.equal` finds no NaN equal to itself."""
    both_nan = value.isnan() & was.isnan() if value.is_floating_point() else torch.zeros((), dtype=torch.bool)
    return bool(((value == was) | both_nan).all())


def _poison(reference: Reference, device: Device) -> None:
    """Fill memory of the sizes that the outputs will take with NaN and free it, so that stale or unwritten rows show."""
    poisoned = [
        torch.full(layout.shape, float("nan"), dtype=getattr(torch, layout.dtype), device=device.torch_device())
        for layout in reference.layouts.values()
        if getattr(torch, layout.dtype).is_floating_point
    ]
    device.synchronize()
    del poisoned


def _on_device(log: Log, fallbacks: Mapping[str, int], device: Device) -> Evidence:
    """Work that silently went to the CPU is a failure, whatever its result."""
    strays = dict(fallbacks)
    find: Callable[[], Mapping[str, int]] | None = getattr(log, "strays", None)
    if find is not None:
        strays |= find()
    listed = ", ".join(f"{name} x{count}" for name, count in sorted(strays.items()))
    return Evidence(f"no operator left {device.name} for the CPU", listed or "none did", not strays)


def _faults(result: Result, reference: Reference, contract: Contract) -> tuple[list[str], tuple[Figure, ...], int]:
    wrong = [str(fault) for fault in check_metadata(result, reference, contract)]
    if wrong:
        return wrong, (), 0
    judgement = judge({path: tensor.cpu() for path, tensor in result.items()}, reference)
    return [str(fault) for fault in judgement.faults], judgement.figures, judgement.compared


def _record(
    case: Case,
    reference: Reference,
    evidence: Sequence[Evidence],
    faults: Sequence[str],
    figures: Sequence[Figure],
    compared: int,
) -> Record:
    absent = [f"not engaged: {e.claim}: observed {e.observed}" for e in evidence if not e.engaged]
    if faults or absent:
        verdict, reason = Verdict.FAIL, "\n".join([*absent, *faults])
    elif len(evidence) < 2:  # the one that the engine adds is about the device, not about the technique
        verdict, reason = Verdict.ERROR, f"{case.technique} gave no evidence that it ran: a verdict needs some"
    elif compared == 0:
        verdict, reason = Verdict.ERROR, "no element was compared: a pass needs at least one"
    else:
        verdict, reason = Verdict.PASS, ""
    return Record(
        case=case,
        verdict=verdict,
        reason=reason,
        evidence=tuple(evidence),
        figures=_telling(figures),
        compared=compared,
        eager_excess=reference.eager_excess,
    )


def _telling(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """Of every view the figure closest to its budget, and all beyond theirs."""
    closest: dict[str, Figure] = {}
    for figure in figures:
        if figure.view not in closest or _used(figure) > _used(closest[figure.view]):
            closest[figure.view] = figure
    beyond = [f for f in figures if f.gates and not f.within]
    return tuple(dict.fromkeys([*closest.values(), *beyond]))


def _used(figure: Figure) -> float:
    """Part of the budget that was used; infinite where an exact result was owed and not given."""
    if figure.measured == 0.0:
        return 0.0
    return figure.measured / figure.allowed if figure.allowed > 0.0 else float("inf")


def _refused(case: Case, capability: Capability) -> Record:
    if capability.verdict is None:
        raise ValueError(f"{case.id}: a technique that runs was refused: pass a capability that says why not")
    return Record(case, capability.verdict, code=str(capability.code), reason=str(capability))
