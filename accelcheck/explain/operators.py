"""Finds the wrong operator: computes every one of a run again, alone and in FP64, from its own inputs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Figure
from accelcheck.core.fault import Fault
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.explain.budgets import OperatorBudgets, OperatorFinding
from accelcheck.explain.calls import OperatorCall, aside, found
from accelcheck.explain.holding import NoTruthError
from accelcheck.explain.places import ModelPlace, Places
from accelcheck.verify.judge import judge_together
from accelcheck.verify.reference import Layout, Reference
from accelcheck.verify.views import Reading


@dataclass(frozen=True)
class Shape(Layout):
    """Metadata of one tensor, as text; a device without strides calls every tensor contiguous."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}, strides {list(self.stride)}"


@dataclass(frozen=True)
class Culprit:
    """An operator whose own error exceeds the budget of its own rounding.

    Attributes:
        number: Position among the operators of the run, from 0.
        operator: Name with namespace and overload, such as ``aten::mm``.
        inputs: Shapes of its tensors, in order.
        options: Other arguments, as text.
        faults: One fault for each output and view.
        call: Call with its inputs; None where several runs together show the fault.
    """

    number: int
    operator: str
    place: ModelPlace
    inputs: tuple[Shape, ...]
    options: str
    faults: tuple[Fault, ...]
    figures: tuple[Figure, ...] = ()
    call: OperatorCall | None = None


@dataclass(frozen=True)
class Seen:
    """One operator of a run: name, arguments that are no tensors, and place."""

    operator: str
    options: str
    place: ModelPlace
    inputs: tuple[Shape, ...]


@dataclass
class OperatorTrace:
    """The operators that a run dispatched.

    Attributes:
        seen: Operators in order, without views.
        culprits: Wrong operators, in order.
        skipped: Numbers of operators not computed again, by name and reason.
        judged: Number of operators computed again.
        leaning: Readings and reference of each operator with errors, by number and dtype: for errors in one direction.
        kept: Call of the operator that alone was judged.
        raised: Operator that raised an exception; empty where none did.
    """

    seen: list[Seen] = field(default_factory=list)
    culprits: list[Culprit] = field(default_factory=list)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    judged: int = 0
    leaning: dict[int, dict[str, tuple[Mapping[str, Reading], Reference]]] = field(default_factory=dict)
    kept: OperatorCall | None = None
    raised: str = ""


class Watcher:
    """Observer of each operator; this one does nothing."""

    def before(self, number: int, seen: Seen, call: OperatorCall) -> None:
        """Called before an operator runs."""

    def after(self) -> None:
        """Called after it has returned."""


@dataclass(eq=False)
class Recompute(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Computes each operator that reaches the backend again. Compiled code dispatches none.

    Args:
        peers: True where the CPU's own operators are another implementation: on every device but the CPU.
        first: Function of the first wrong operator, or the one of `only`, and of a function that runs it with
            other inputs, below every active mode.
        most: Number of wrong operators after which none is judged; 0 judges none, and only notes what is dispatched.
        only: Number of the one operator that is judged, and kept in `OperatorTrace.kept`; None for all.
    """

    holder: OperatorBudgets
    places: Places
    peers: bool = False
    first: Callable[[Culprit, Callable[[OperatorCall], Any]], None] | None = None
    most: int = 1
    only: int | None = None
    watcher: Watcher = field(default_factory=Watcher)
    trace: OperatorTrace = field(default_factory=OperatorTrace)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = OperatorCall(func, args, kwargs or {})
        place = self.places.here()
        if func.is_view:
            return call.run()
        number = len(self.trace.seen)
        inputs = tuple(Shape.of(tensor) for tensor in call.tensors() if tensor.layout is torch.strided)
        self.trace.seen.append(Seen(func.name(), options(call), place, inputs))
        why = call.not_computed() or ("" if found((call.args, *call.kwargs.values())) else "takes no tensor")
        if why:
            self.trace.skipped[call.name, why] += 1
        if why or len(self.trace.culprits) >= self.most or self.only not in {None, number}:
            return self._ran(call)
        with aside():
            writes = func._schema.is_mutable or call.name.endswith("batch_norm")  # noqa: SLF001 - no public schema
            before = call.kept() if writes else call
        out = self._ran(call)
        finding = self._judged(before, call.results(out))
        if finding is not None:
            self._note(number, finding)
            if finding.faults or self.only == number:
                self._report(number, before, finding)
        return out

    def _judged(self, call: OperatorCall, results: Mapping[str, Any]) -> OperatorFinding | None:
        """Judge the results of a call; None where nothing can judge them."""
        if not results:
            self.trace.skipped[call.name, "returns no tensor"] += 1
            return None
        try:
            finding = self.holder.find(call, results, peers=self.peers)
        except NoTruthError as error:
            self.trace.skipped[call.name, str(error)] += 1
            return None
        self.trace.judged += 1
        return finding

    def _report(self, number: int, call: OperatorCall, finding: OperatorFinding) -> None:
        """Keep a wrong operator, or the one of `only`, and pass the first one on."""
        seen = self.trace.seen[number]
        figures = tuple(figure for judgement in finding.judged.values() for figure in judgement.figures)
        with aside():
            kept = call.kept()
            if self.only == number:
                self.trace.kept = call.kept()
        culprit = Culprit(number, seen.operator, seen.place, seen.inputs, seen.options, finding.faults, figures, kept)
        if finding.faults:
            self.trace.culprits.append(culprit)
        if self.first is not None and (self.only == number or len(self.trace.culprits) == 1):
            with torch.no_grad():
                self.first(culprit, lambda other: other.run())

    def _ran(self, call: OperatorCall) -> Any:
        self.watcher.before(len(self.trace.seen) - 1, self.trace.seen[-1], call)
        try:
            out = call.run()
        except Exception:
            self.trace.raised = self.trace.raised or call.func.name()
            raise
        self.watcher.after()
        return out

    def _note(self, number: int, finding: OperatorFinding) -> None:
        """Keep the readings, without the tensors.

        Running statistics are left out: constants that are rounded once, such as 1 - momentum, move them one way in
        every draw.
        """
        for dtype, judgement in finding.judged.items():
            reference = finding.references[dtype]
            light = Reference({}, {}, {}, reference.leanings, reference.unit, reference.spacing, 0.0)
            readings = {path: reading for path, reading in judgement.readings.items() if not path.startswith("running")}
            self.trace.leaning.setdefault(number, {})[dtype] = (readings, light)


def together(traces: Sequence[OperatorTrace]) -> Culprit | None:
    """Find the first operator whose errors point one way in several runs with different inputs; None where none does.

    Runs that dispatch different operators are not compared.
    """
    names = [[seen.operator for seen in trace.seen] for trace in traces]
    if any(run != names[0] for run in names):
        return None
    for number in sorted(set.intersection(*(set(trace.leaning) for trace in traces))):
        for dtype in traces[0].leaning[number]:
            draws = [trace.leaning[number][dtype] for trace in traces if dtype in trace.leaning[number]]
            judgement = judge_together(draws) if len(draws) == len(traces) else None
            if judgement is not None and judgement.faults:
                seen = traces[0].seen[number]
                what = seen.operator, seen.place, seen.inputs, seen.options
                return Culprit(number, *what, judgement.faults, judgement.figures, traces[0].kept)
    return None


def options(call: OperatorCall) -> str:
    """Text of the arguments that are no tensors, no devices and not the defaults."""
    texts = []
    for argument in call.func._schema.arguments:  # noqa: SLF001 - OpOverload has no public schema
        value = call.named().get(argument.name)
        if value is None or isinstance(value, (Tensor, torch.device)) or found((value,)):
            continue
        if argument.has_default_value() and value == argument.default_value:
            continue
        texts.append(f"{argument.name}={value}")
    return ", ".join(texts)
