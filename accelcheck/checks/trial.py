"""The input of a check (`Trial`), its result (`Finding`), and the functions that all checks share."""

import contextlib
import gc
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import FELL_BACK, Case, Evidence, Figure, Measurement, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.plain import text
from accelcheck.devices.base import Device
from accelcheck.devices.layouts import dense
from accelcheck.devices.torch_names import UnknownTorchError
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import graphs
from accelcheck.techniques.observe import Log, OperatorLog
from accelcheck.verify import known_answers
from accelcheck.verify.effort import Effort
from accelcheck.verify.global_state import GlobalState
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.verify.reference import OracleError, Reference
from accelcheck.workloads.base import Problem, Program, Result, Workload, to
from accelcheck.workloads.probes import Draw

UNJUDGED = "tensors that rounding errors alone decide, and that are not judged"
"""Claim of a remark."""
MOST_FAULTS = 1000
"""Number of faults after which no further draw is judged, and most that a record keeps: journal lines are bounded."""


_PACKAGE = Path(__file__).parents[1]
_COLOURS = re.compile(r"\\x1b\[[0-9;]*m")


def reason_of(error: BaseException) -> str:
    """Returns the first two lines of the root exception: those that follow name the operator less often."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = _COLOURS.sub("", text(error)).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__


def forget(error: BaseException) -> None:
    """Releases the tensors that a traceback holds: torch_xla lowers live ones again, and fails in every later call."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    gc.collect()


COMPILED = "an OperatorLog does not see the operators of compiled code: set `watch = ProfilerLog`"
"""Advice if a technique of another package compiles and its evidence is missing."""


_GRAPHS = "accelcheck.graphs"
"""Key in `Program.extras`: number of compiled graphs before the technique was applied."""


def _compiled() -> int | None:
    """Number of compiled graphs; None if this torch does not tell."""
    try:
        return graphs()
    except UnknownTorchError:
        return None


def _foreign(technique: Technique) -> bool:
    return not type(technique).__module__.startswith("accelcheck.")


class Clock:
    """Accumulates wall time by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time spent within the context to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Trial:
    """Case with its technique, workload and device, and the store of references."""

    case: Case
    technique: Technique
    workload: Workload
    device: Device
    store: Store
    clock: Clock = field(default_factory=Clock)
    trace: Path | None = None
    """File for a trace of the case; None for no trace."""
    state: GlobalState = field(default_factory=GlobalState.now)
    """Global state before the technique was prepared, under which problems are made and results judged."""
    _answered: list[bool] = field(default_factory=list)
    """Non-empty once the judging code has reproduced its known answers with the technique prepared."""
    _applied: list[bool] = field(default_factory=list)
    """Non-empty once the technique could be applied."""

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Restores the global state for judging, whatever the technique has changed in this process.

        Raises:
            KnownAnswerError: The judging code computes wrong numbers nevertheless.
        """
        with self.clock("judge"), self.state.restored():
            if not self._answered:
                known_answers.check()
                known_answers.check_views()
                self._answered.append(True)
            yield

    def place(self, problem: Problem, seed: int) -> Program:
        """Moves a problem to the device, in the case's dtype, without the technique."""
        with self.state.restored():
            program = Program.of(
                problem,
                device=self.device.torch_device(),
                dtype=getattr(torch, self.case.dtype),
                seed=seed,
                synchronize=self.device.synchronize,
            )
        if self.workload.given:
            program.steps = self.effort.taken(program.steps)
        return program

    @property
    def effort(self) -> Effort:
        """Amount of computation to judge the case."""
        with self.clock("oracle"), self.state.restored():
            return self.store.effort(self.case, self.workload)

    def reference(self, draw: Draw = FIRST, *, careful: int = 0, algorithm: str = "", part: str = "") -> Reference:
        """Returns the reference of a draw, or that of a `part` of a divisible workload; see `Store.get`.

        Raises:
            OracleError: Eager on the CPU is wrong, and another technique is to be judged: see `Reference.eager_unlike`.
        """
        workload = self.workload.only(part) if part else self.workload
        with self.clock("oracle"), self.state.restored():
            reference = self.store.get(self.case, self.technique, workload, draw, careful=careful, algorithm=algorithm)
        if reference.eager_unlike and self.technique.family != "eager":
            raise OracleError(
                f"{self.workload.name} ({draw}): eager {self.case.dtype} on the CPU is wrong, so no technique can be "
                f"equal to it: {reference.eager_unlike}, first in the FP64 oracle and then in eager"
            )
        # Eager on the CPU must not be compared with itself: the rounding samples alone judge it.
        return reference.without_eager if self.technique.family == "eager" and self.device.has("host") else reference

    def problem(self, seed: int, extent: int = 0) -> Problem:
        """Makes the workload's problem of a seed."""
        with self.state.restored():
            return self.workload.problem(seed, extent)

    def program(self, seed: int) -> Program:
        """Makes the workload's problem of a seed and moves it to the device."""
        return self.place(self.problem(seed), seed)

    def prepare(self, program: Program, mode: Mode | None = None) -> None:
        """Applies the technique to a program, for the case's mode unless another one is given.

        Raises:
            Unsupported: A library refuses a user-owned model that one of accelcheck's techniques first hands to it.
        """
        if _foreign(self.technique):
            program.extras[_GRAPHS] = _compiled()
        try:
            self.technique.prepare(program, mode or self.case.mode, self.device)
            self._applied.append(True)  # from now on what raises is wrong
        except (Unsupported, MemoryError, torch.OutOfMemoryError, ImportError, OSError):
            raise
        except Exception as error:
            owned = self.workload.owned and type(self.technique).__module__.startswith("accelcheck.techniques.")
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if self._applied or not owned or Path(frame.f_code.co_filename).is_relative_to(_PACKAGE):
                raise
            reason = f"{self.technique.name} cannot be applied to this model: {reason_of(error)}"
            raise Unsupported(unsupported(Code.NO_FEATURE, reason)) from error

    def placed(self, value: Any) -> Any:
        """Moves an input or target to the device, in the case's dtype where it is floating-point."""
        return to(value, self.device.torch_device(), getattr(torch, self.case.dtype))


@dataclass(frozen=True)
class Finding:
    """Outcome of a check.

    Attributes:
        evidence: Observations which show that the technique ran.
        faults: Faults other than missing evidence.
        figures: Measured errors and their budgets.
        compared: Number of elements that were compared; a pass needs at least one.
        lacking: Kind of tensors that the case is about, such as ``gradient``, where none was compared; else empty.
        eager_excess: See `accelcheck.verify.reference.Reference`; 0 where a check has no such reference.
        measurements: Time and memory, where the check measures them.
        digest: Digest of everything that the timed work depends on, where the check measures.
        times: Times of blocks, in seconds.
        implausible: Reason why the timed calls cannot have done the work; empty for none.
        refused: Reasons of the parts of the workload that the technique refuses, by label.
    """

    evidence: Sequence[Evidence]
    faults: Sequence[Fault]
    figures: Sequence[Figure]
    compared: int
    eager_excess: float = 0.0
    measurements: Sequence[Measurement] = ()
    digest: str = ""
    times: Sequence[float] = ()
    lacking: str = ""
    implausible: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def undecided(self) -> str:
        """Reason why the absence of faults decides nothing; empty if the case is decided."""
        if self.compared and not self.lacking:
            return ""
        name = self.lacking or "element"
        if any(item.claim == UNJUDGED for item in self.evidence):
            remedy = "; a smaller learning rate may help" if name == "parameter" else ""
            return f"no {name} was compared: rounding errors alone decide each of them{remedy}"
        return f"no {name} was compared: a pass needs at least one"

    @property
    def wrong(self) -> tuple[Fault, ...]:
        """Faults of claims that were not seen, then the others; empty if the case passes."""
        return (*(fault for item in self.evidence if not item.engaged for fault in _unseen(item)), *self.faults)


def _unseen(evidence: Evidence) -> Iterator[Fault]:
    """Yields the fault of a claim that was not seen, or one for each operator that ran elsewhere."""
    missing = [(name, f"{name} x{count}") for name, count in evidence.strays] or [("", str(evidence.observed))]
    for operator, got in missing:
        yield Fault(FaultKind.EVIDENCE, evidence.claim, operator, evidence.draw, got=got)


def watched(
    trial: Trial, program: Program, mode: Mode, ended: Callable[[], object] = lambda: None
) -> tuple[Result, list[Evidence]]:
    """Runs a program once; returns the result, and evidence of the technique and of the device.

    Args:
        trial: The case.
        program: Prepared program.
        mode: Mode that is run.
        ended: Function called after the run, before the evidence is taken.
    """
    technique, device = trial.technique, trial.device
    for reset in program.resets:
        reset()
    with trial.clock("run"):
        device.reset_fallbacks()
        with technique.watch(device.type) as log:
            result = program.run(mode)
        ended()
        fallbacks = device.fallbacks()
    with trial.clock("evidence"):
        seen = [*technique.evidence(program, log, mode, device)]
    if _foreign(technique) and isinstance(log, OperatorLog) and _compiled() != program.extras.get(_GRAPHS):
        seen = [one if one.engaged else replace(one, observed=f"{one.observed}; {COMPILED}") for one in seen]
    return result, [*seen, on_device(log, fallbacks, trial)]


def unobserved(
    trial: Trial, program: Program, mode: Mode, ended: Callable[[], object] = lambda: None
) -> tuple[Result, list[Evidence]]:
    """Runs a program once as users do, without dispatch mode or profiler; evidence is that of the device alone.

    Args: see `watched`.
    """
    for reset in program.resets:
        reset()
    with trial.clock("run"):
        trial.device.reset_fallbacks()
        result = program.run(mode)
        ended()
        return result, [on_device(None, trial.device.fallbacks(), trial)]


def absent(known: Iterable[Evidence], later: Iterable[Evidence], where: str) -> list[Evidence]:
    """Returns evidence of a later run that did not engage and is not known yet, labelled with the run."""
    missing = {item.claim for item in known if not item.engaged}
    return [replace(item, draw=where) for item in later if not item.engaged and item.claim not in missing]


def warm_up(trial: Trial, program: Program) -> None:
    """Runs with other inputs first, so that the judged run is in the steady state and no cached result serves it."""
    technique = trial.technique
    for number in range(1, technique.warmups + 1):
        extent = number if technique.resizing and "resizable" in trial.workload.traits else 0
        other = trial.problem(trial.case.seed + number, extent)
        if extent and _sizes(other.inputs) == _sizes(program.inputs):
            raise ValueError(
                f"the workload {trial.workload.name} has the trait `resizable`, but its maker gives inputs of the "
                f"same sizes for extent 0 and {extent}: {_sizes(other.inputs)}. Add `extent` to the sizes that may "
                "vary, or remove the trait"
            )
        with given(trial, program, other):
            program.run(trial.case.mode)


@contextlib.contextmanager
def given(trial: Trial, program: Program, other: Problem) -> Iterator[None]:
    """Gives a program the inputs and targets of another problem within the context."""
    judged = program.inputs, program.target, program.further, program.scaler
    program.inputs, program.target = tuple(map(trial.placed, other.inputs)), trial.placed(other.target)
    program.further = tuple(
        (tuple(map(trial.placed, inputs)), trial.placed(target)) for inputs, target in other.further
    )
    yield
    program.inputs, program.target, program.further, program.scaler = judged


def _sizes(inputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(value.shape) for value in inputs if isinstance(value, Tensor)]


class State:
    """Copy of parameters and buffers, to restore them between runs and to find changes."""

    def __init__(self, program: Program) -> None:
        self._tensors = dict(program.module.named_parameters())
        self._buffers = dict(program.module.named_buffers())
        self._before = {name: snapshot(t) for name, t in (self._tensors | self._buffers).items()}

    def restore(self) -> None:
        """Writes the values back in place, so that code compiled for these tensors stays valid."""
        with torch.no_grad():
            for name, tensor in (self._tensors | self._buffers).items():
                if not unchanged(tensor.detach().cpu(), self._before[name]):
                    tensor.copy_(self._before[name].to(tensor.device))

    def mutations(self) -> list[Fault]:
        """Returns a fault for each parameter that a pass changed."""
        before = self._before
        return [f for name, tensor in self._tensors.items() for f in changed(f"parameter:{name}", tensor, before[name])]

    def changed_buffers(self) -> list[str]:
        """Returns the names of changed buffers, which in training are part of the judged result."""
        buffers, before = self._buffers, self._before
        return [name for name, tensor in buffers.items() if not unchanged(tensor.detach().cpu(), before[name])]


def snapshot(value: Any) -> Any:
    """Copies a tensor to the CPU; returns other values unchanged."""
    return value.detach().clone().cpu() if isinstance(value, Tensor) else value


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by size in bytes."""


def unchanged(value: Tensor, was: Tensor) -> bool:
    """Returns True if two tensors have the same bits; by value NaN would differ from itself, and -0 would equal 0."""
    value, was = dense(value), dense(was)
    if value.is_complex():
        value, was = torch.view_as_real(value), torch.view_as_real(was)
    bits = _BITS[value.element_size()]
    return torch.equal(value.view(bits), was.view(bits))


def mutations(inputs: Sequence[Any], before: Sequence[Any]) -> list[Fault]:
    """Returns a fault for each input that differs from its snapshot."""
    pairs = enumerate(zip(inputs, before, strict=True))
    return [fault for index, (value, was) in pairs for fault in changed(f"input[{index}]", value, was)]


def changed(path: str, value: Any, was: Any) -> list[Fault]:
    """Returns a fault if a tensor has other bits than its snapshot."""
    if not isinstance(value, Tensor) or unchanged(value.detach().cpu(), was):
        return []
    return [Fault(FaultKind.MUTATED, path, expected="it bitwise unchanged", got="other bits")]


def on_device(log: Log | None, fallbacks: Mapping[str, int], trial: Trial) -> Evidence:
    """Makes the evidence that no operator fell back to the CPU; `log` is None for an unobserved run.

    Operators that the backend lacks are no fault of a technique for a user-owned model: the evidence names them.
    """
    strays = dict(fallbacks)
    find: Callable[[], Mapping[str, int]] | None = getattr(log, "strays", None)
    if find is not None:
        strays |= find()
    evidence = Evidence.stayed(strays, trial.device.name)
    if trial.workload.owned and strays and strays.keys() <= fallbacks.keys():
        return replace(evidence, claim=FELL_BACK, engaged=True)
    return evidence
