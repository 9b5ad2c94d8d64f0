"""Check of values: outputs, gradients and short trainings against the oracle, over several draws of the inputs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accelcheck.checks.calls import called_often
from accelcheck.checks.closer import CloserLooks
from accelcheck.checks.own_model import widened
from accelcheck.checks.remarks import ALGORITHM, REFUSED, UNDECIDED, UNSTEADY, remarks
from accelcheck.checks.repeats import halved, held
from accelcheck.checks.traces import Traces, asking
from accelcheck.checks.trial import (
    MOST_FAULTS,
    Finding,
    State,
    absent,
    forget,
    given,
    reason_of,
    unobserved,
    warm_up,
    watched,
)
from accelcheck.core.case import SCHEME, Evidence, Figure, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.plain import text
from accelcheck.devices.layouts import contiguous, sparse
from accelcheck.expectations import ceilings
from accelcheck.measure.clocks import undisturbed
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.eager import Eager
from accelcheck.verify.judge import Contract, apart, check_metadata, judge
from accelcheck.verify.known_answers import KnownAnswerError
from accelcheck.verify.matched import aligned
from accelcheck.verify.oracle import FIRST
from accelcheck.verify.oracle_runs import twice
from accelcheck.verify.reference import OracleError, VacuousError
from accelcheck.workloads.own_model import Redrawn
from accelcheck.workloads.probes import PROBES, Draw, Probe, draws
from accelcheck.workloads.problem import divided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from accelcheck.checks.trial import Trial
    from accelcheck.devices.base import Device
    from accelcheck.verify.oracle import Store
    from accelcheck.verify.reference import Reference
    from accelcheck.verify.views import Reading
    from accelcheck.workloads.base import Problem, Program, Result


def verify(trial: Trial, chosen: Sequence[Draw] | None = None) -> Finding:
    """Judges draws (`FIRST` first; None for all of the workload's), the random ones together too, and a rerun.

    Raises:
        OracleError: The oracle of a draw fails or cannot be trusted.
    """
    with trial.device.strict_float32():
        try:
            finding = _Run(trial).finding(chosen)
            if chosen is not None or not trial.workload.owned:
                return finding
            return widened(trial, finding, lambda other: _Run(other).finding([FIRST]))
        except (OracleError, KnownAnswerError):
            raise
        except Exception:
            if not trial.workload.divisible:
                raise
            refused = refusals(trial)
            if not refused:
                raise  # parts are refused only together, or all are refused
        # A translation may refuse an operator; in eager a missing operator is a fault.
        lacking = refused if trial.technique.family == "eager" else {}
        raised = [(label, reason.partition(": ")) for label, reason in lacking.items()]
        faults = [Fault(FaultKind.RAISED, f"out[{label!r}]", kind, got=got) for label, (kind, _, got) in raised]
        try:
            finding = _Run(replace(trial, workload=trial.workload.without(frozenset(refused)))).finding(chosen)
        except OracleError:
            if not faults or trial.case.mode is Mode.FORWARD:
                raise
            finding = Finding([], [], [], 0)  # the other parts have no gradients, and nothing is left to judge
        observed = ", ".join(f"{label} ({reason})" for label, reason in refused.items())
        evidence = [*finding.evidence, Evidence(REFUSED, observed, engaged=True)]
        return replace(finding, evidence=evidence, faults=[*faults, *finding.faults], refused=refused)


def refusals(trial: Trial) -> dict[str, str]:
    """Bisects a divisible workload for parts that raise under the technique; returns label -> reason.

    Empty where all parts raise, or none does alone.
    """
    labels = divided(trial.problem(trial.case.seed).module).labels
    refused = dict[str, str]()
    open_subsets = [labels[: len(labels) // 2], labels[len(labels) // 2 :]]
    while open_subsets:
        subset = open_subsets.pop(0)
        reason = _refusal(trial, frozenset(labels) - frozenset(subset))
        if not reason:
            continue
        if len(subset) == 1:
            refused[subset[0]] = reason
        else:
            open_subsets += [subset[: len(subset) // 2], subset[len(subset) // 2 :]]
    return refused if len(refused) < len(labels) else {}


def _refusal(trial: Trial, left_out: frozenset[str]) -> str:
    """Returns a line about the exception of a run without some parts; empty where it runs."""
    try:
        trial.technique.finish()
        _try(replace(trial, workload=trial.workload.without(left_out).narrowed()))
    except Exception as error:  # noqa: BLE001 - a converter may raise anything
        reason = reason_of(error)
        forget(error)
        return reason
    finally:
        trial.technique.finish()
    return ""


def _try(part: Trial) -> None:
    """Runs a program once; its results are released at the end."""
    program = part.program(part.case.seed)
    part.technique.prepare(program, part.case.mode, part.device)
    warm_up(part, program)
    with part.technique.watch(part.device.type):  # vmap raises for some operators under a dispatch mode alone
        program.run(part.case.mode)
    part.device.synchronize()


MOST_RAISED = 3
"""Most draws that may raise: after each the program is prepared anew, which may take minutes."""
SUBJECTS = {
    Mode.FORWARD: ("out", "output"),
    Mode.BACKWARD: ("grad", "gradient"),
    Mode.TRAIN: ("parameter", "parameter"),
}
"""Kind of the judged tensors by mode, and its name in messages."""
AGAIN = "run again"
"""Draw name of faults in a second run of the first draw; in backward mode that run accumulates gradients."""
STALE = 10
"""Least factor by which errors shrink on renewed preparation that shows that the program holds copies."""


class _Run:
    """Runs the draws of one case in turn, in one program prepared for the first draw where the technique allows it."""

    def __init__(self, trial: Trial, draw: Draw = FIRST) -> None:
        self.trial = trial
        technique, device, case = trial.technique, trial.device, trial.case
        dtypes = frozenset({technique.precision(case.dtype)} - {case.dtype})
        strides = technique.keeps_strides and device.has("strided")
        self._strict = Contract(device.type, strides, dtypes, eager_strides(trial) if strides else {})
        # In a user-owned model other strides with right values are a remark.
        self.contract = replace(self._strict, strides=strides and not trial.workload.owned)
        self.evidence: list[Evidence] = []
        self.faults: list[Fault] = []
        self.figures: list[Figure] = []
        self.alike: dict[str, list[tuple[Draw, Mapping[str, Reading], Reference]]] = {}
        self._wrong: list[Draw] = []  # with faults of their own, in order
        self._excess: dict[Draw, float] = {}
        """Largest error of each judged draw, as a multiple of its budget."""
        self._closer = CloserLooks(trial)
        self.compared: Counter[str] = Counter()
        self.excess = 0.0
        self._unobserved: Draw | None = None
        """Draw that runs unobserved; None if the first is the only random one: its second run is then unobserved."""
        self._held: Callable[[], list[Fault]] = list
        """Returns the faults of the result that is held over the next call."""
        self._last: Draw | None = None
        """Last random draw, whose inputs further calls get; None where none are wanted, as in timed cases."""
        self._traces: Traces | None = None  # of the previous run
        self._asking: Mapping[str, bool]
        """True for each parameter that requires a gradient once the technique is prepared."""
        self.program = self._prepared(draw)
        self.parameters = draw.parameters

    def finding(self, chosen: Sequence[Draw] | None = None) -> Finding:
        """Runs and judges each draw, faulty or not, then all random draws together."""
        trial = self.trial
        raised: dict[Fault, Exception] = {}
        every = chosen is None
        if chosen is None:
            chosen = trial.effort.chosen(draws(trial.workload, trial.case.mode, self._admitted))
        others = [draw for draw in chosen if draw != FIRST and not draw.probe]
        self._unobserved = next(iter(others[-2:]), None)  # the last draw shows techniques that stop engaging
        self._last = (others or [FIRST])[-1] if every else None
        for draw in chosen:
            known = len(self.faults)
            try:
                self._judge(draw)
                self._wrong += [draw] * any(fault.kind is not FaultKind.STATE for fault in self.faults[known:])
            except Exception as error:  # noqa: BLE001 - a fault of this draw, or raised again below
                if isinstance(error, VacuousError) and draw != FIRST and isinstance(trial.workload.make, Redrawn):
                    # Shuffled numbers lie near thresholds of an owner's model that its own inputs keep away from.
                    self.evidence.append(Evidence(UNDECIDED, str(draw), engaged=True))
                    forget(error)
                    continue
                first = next(iter(text(error).splitlines()), "")
                raised[_drawn(Fault(FaultKind.RAISED, "run", type(error).__name__, got=first), draw)] = error
                forget(error)
                own = isinstance(error, OracleError | KnownAnswerError | Unsupported)  # it says nothing of the draws
                if own or len(raised) == MOST_RAISED or not self._renewed():
                    break
            if len(self.faults) >= MOST_FAULTS:
                break
        for probe in self.alike:
            together = self._closer.together(self.alike[probe])
            self.faults += [_drawn(fault, Draw(0, probe)) for fault in together.faults]
            self.figures += together.figures
        # A ledger may know one of several exceptions: the others must show. Parts that raise are looked for one by one.
        kinds = {(fault.view, fault.got) for fault in raised}
        if not self.faults and (len(kinds) == 1 or (kinds and trial.workload.divisible)):
            raise next(iter(raised.values()))
        self.faults += raised
        if self._closer.needed:
            listed = (f"{name} ({', '.join(map(str, drawn))})" for name, drawn in self._closer.needed.items())
            self.evidence.append(Evidence(ALGORITHM, "; ".join(listed), engaged=True))
        self._explain([draw for draw in chosen if draw.parameters != FIRST.parameters and not draw.probe])
        subject, name = SUBJECTS[trial.case.mode]
        lacking = "" if self.compared[subject] else name
        compared = self.compared.total()
        return Finding(self.evidence, self.faults, self.figures, compared, self.excess, lacking=lacking)

    def _renewed(self) -> bool:
        """Prepares a new program after a run raised; returns False if that fails."""
        try:
            self.trial.technique.finish()
            self.program, self.parameters = self._prepared(FIRST), FIRST.parameters
        except Exception:  # noqa: BLE001 - the exception of the run says more
            return False
        return True

    def _explain(self, others: Sequence[Draw]) -> None:
        """Adds a fault where `prepare` copies parameters and `Technique.bakes` is False.

        All random draws with other parameters are then wrong, and the first of them, `others[0]`, is right or much
        less wrong once the program is prepared for it.
        """
        if self.trial.technique.bakes or not others or not set(others) <= set(self._wrong):
            return
        trial, draw = self.trial, others[0]
        trial.technique.finish()
        try:
            anew = _Run(trial, draw)
            anew._judge(draw)
        except Exception:  # noqa: BLE001 - it would only hide the faults above
            return
        was, now = self._excess.get(draw, math.inf), anew._excess.get(draw, math.inf)
        if not anew.faults or 0 < now * STALE <= was < math.inf:
            kind = type(trial.technique).__name__
            better = f"errors {was / now:.0f} times smaller" if anew.faults else "right results"
            expected = "results that follow parameters and inputs, which change in place between runs"
            got = (
                f"{better} when prepared anew. Let {kind}.prepare use the tensors themselves, or set "
                f"{kind}.bakes to True if it copies parameters on purpose"
            )
            self.faults.append(_drawn(Fault(FaultKind.STALE, "prepare", expected=expected, got=got), draw))

    def _admitted(self, probe: Probe) -> bool:
        technique = self.trial.technique
        if probe.reshapes and (technique.level > 1 or self.trial.device.has("lazy")):
            return False  # another shape would be compiled anew
        return technique.admits(probe)

    def _judge(self, draw: Draw) -> None:
        trial = self.trial
        case, device, clock = trial.case, trial.device, trial.clock
        first = draw == FIRST
        reference = trial.reference(draw)
        self.figures += self._above(reference)
        with clock("prepare"):
            if trial.technique.bakes and draw.parameters != self.parameters:
                trial.technique.finish()
                self.program = self._prepared(draw)
            self.parameters = draw.parameters
            kept = self.program.inputs
            if not first:
                problem = self._problem(draw)
                # Asked on the CPU: a device without strides calls every tensor contiguous.
                dense = [isinstance(value, Tensor) and contiguous(value) for value in problem.inputs]
                strided = device.has("strided")
                _refill(self.program, self._placed(draw, problem), dense, strided=strided)
            # Gradients of a transposition are strided, which must not change values.
            self.program.strided_cotangents = device.has("strided") and draw.number % 2 == 1
            state = State(self.program)
        if draw == self._unobserved and trial.technique.bakes:
            self._distract(draw, state)  # no watched run has followed its preparation
        with clock("prepare"):
            _poison(reference, device)
            device.seed(draw.seed(case.seed))
            traces = Traces(trial, self.program, state, self._asking, training=case.mode is not Mode.FORWARD)
        run = unobserved if draw == self._unobserved else watched
        raw, evidence = run(trial, self.program, case.mode, traces.end)
        self.evidence += (
            [*evidence, *remarks(trial, self.program, reference, raw, self._strict)]
            if first
            else absent(self.evidence, evidence, str(draw))
        )
        with trial.judging():
            self._let_go(draw)
            left, self._traces = traces.faults(raw, self._traces), traces
            result = self._values(raw, reference, draw)
            self.faults += [_drawn(fault, draw) for fault in left]
            self.excess = max(self.excess, reference.eager_excess)
        if first and result:
            with clock("rerun"):
                self._rerun(result, state, reference)
        if draw == self._last and result:
            self._call_often(result, reference, draw)
        state.restore()
        if draw.probe and PROBES[draw.probe].reshapes:
            self.program.inputs = kept

    def _values(self, result: Result, reference: Reference, draw: Draw) -> Result:
        """Judges the tensors whose metadata is right; returns the result on the CPU, empty if metadata is wrong."""
        contract = self.contract
        if contract.strides and draw.probe and PROBES[draw.probe].reshapes:
            contract = replace(contract, eager_strides=eager_strides(self.trial, draw))
        result, reference, rows = self._matched(result, reference, draw)
        wrong = [*check_metadata(result, reference, contract), *rows]
        self.faults += [_drawn(fault, draw) for fault in wrong]
        misshapen = {fault.path for fault in wrong if fault.view != "strides"}  # other strides keep the values
        result = _on_host({path: tensor for path, tensor in result.items() if path not in misshapen})
        judgement = judge(result, reference)
        gates = [figure for figure in judgement.figures if figure.gates and figure.allowed > 0]
        self._excess[draw] = max((figure.measured / figure.allowed for figure in gates), default=0.0)
        judgement, reference = self._closer.judged(result, judgement, reference, draw)
        self.faults += [_drawn(fault, draw) for fault in judgement.faults]
        self.figures += judgement.figures
        self.compared.update(judgement.compared)
        if draw == FIRST:
            self.figures += self._scheme(result)
        self.alike.setdefault(draw.probe, []).append((draw, judgement.readings, reference.summary))
        return {} if wrong else result

    def _matched(self, result: Result, reference: Reference, draw: Draw) -> tuple[Result, Reference, list[Fault]]:
        """Matches rows whose number rounding decides, though perhaps in this result first."""
        trial = self.trial
        shapes = [(result[path].shape, truth.shape) for path, truth in reference.truth.items() if path in result]
        other = any(own != truth and own[1:] == truth[1:] for own, truth in shapes)
        if other and not reference.groups and trial.workload.owned and trial.case.mode is Mode.FORWARD:
            reference = trial.reference(draw, careful=1)
        kept, faults = aligned(result, reference.truth, reference.groups, reference.unit)
        return kept, reference, faults

    def _scheme(self, result: Result) -> Iterator[Figure]:
        """Yields a user-owned model's largest error under a scheme such as quantization, against the FP32 model."""
        trial = self.trial
        if not trial.workload.given or trial.technique.oracle == "float64" or trial.case.mode is not Mode.FORWARD:
            return
        plain = trial.store.get(trial.case, Eager(), trial.workload)
        shapes = {path: tuple(tensor.shape) for path, tensor in result.items()}
        sticks = {path: stick for path, stick in plain.sticks.items() if shapes.get(path) == stick.shape}
        rows = {path: stick.read(result[path])["row"] for path, stick in sticks.items()}
        if rows:  # a record keeps one figure of a view without budget
            worst = max(rows, key=rows.__getitem__)
            yield Figure(worst, SCHEME, rows[worst], math.inf, "", gates=False)

    def _above(self, reference: Reference) -> Iterator[Figure]:
        """Yields budgets above the stored ceilings of built-in cases, for the run's summary; they gate nothing."""
        case, technique = self.trial.case, self.trial.technique
        name = ceilings.key(case.workload, case.dtype, case.mode, technique.precision(case.dtype), technique.oracle)
        for path, view, budget, limit in ceilings.above(name, reference.budgets, ceilings.stored()):
            yield Figure(path, f"{ceilings.PREFIX}{view}", budget, limit, "", gates=False)

    def _rerun(self, result: Result, state: State, reference: Reference) -> None:
        """Runs again unobserved: other bits are judged like any result, and are a fault on a deterministic device.

        In backward mode the second pass accumulates gradients, and half of the sum must equal the first ones.
        """
        trial, program = self.trial, self.program
        kept = {path: tensor.clone() for path, tensor in result.items()}
        single = self._unobserved is None
        if single:
            self._distract(FIRST, state)
        sums = trial.case.mode is Mode.BACKWARD and not (single or program.elsewhere or program.overwrites)
        if sums and any(f"grad:{name}" in result and p.grad is None for name, p in program.module.named_parameters()):
            self._again(state)  # evidence may have cleared the gradients to add to
        raw = self._again(state, accumulates=sums)
        self._let_go(FIRST)
        self._hold(raw)
        again = halved(_on_host(raw), kept) if sums else _on_host(self._matched(raw, reference, FIRST)[0])
        if any(apart(kept, again).values()):
            with trial.judging():
                wrong = self._judged_again(raw, again, reference, FIRST)
            self.faults += [replace(fault, draw=AGAIN) for fault in wrong]
            if sums or trial.device.has("lazy"):
                # A fused sum rounds once, and live tensors and observers decide what a lazy device fuses: repeat both
                # runs unobserved, with nothing else alive.
                kept, again = self._alone(state), self._alone(state)
        own = trial.workload.owned
        deterministic = trial.device.has("deterministic") and "unsteady" not in trial.workload.traits and not own
        distances = apart(kept, again)
        for path, distance in distances.items():
            allowed = 0.0 if deterministic else float("inf")
            self.figures.append(Figure(path, "rerun", distance, allowed, "", gates=deterministic))
            if deterministic and distance:
                got = f"{distance:.3g} relative difference"
                self.faults.append(Fault(FaultKind.RERUN, path, expected="the same bits", got=got, measured=distance))
        if own and any(distances.values()):
            worst = max(distances, key=distances.__getitem__)
            observed = f"{sum(map(bool, distances.values()))} of {len(distances)}, {worst} by {distances[worst]:.3g}"
            self.evidence.append(Evidence(UNSTEADY, observed, engaged=True))

    def _judged_again(self, raw: Result, result: Result, reference: Reference, draw: Draw) -> Sequence[Fault]:
        """Returns the faults of a further result of a draw, given on its device and on the CPU."""
        raw, reference, rows = self._matched(raw, reference, draw)
        if wrong := [*check_metadata(raw, reference, self.contract), *rows]:
            return wrong
        result = _on_host(raw) if reference.groups else result
        return self._closer.judged(result, judge(result, reference), reference, draw)[0].faults

    def _call_often(self, result: Result, reference: Reference, draw: Draw) -> None:
        """Calls the program many times more with the inputs of a draw."""

        def faults(again: Result) -> Sequence[Fault]:
            with self.trial.judging():
                return self._judged_again(again, _on_host(again), reference, draw)

        with self.trial.clock("rerun"):
            self.faults += [_drawn(fault, draw) for fault in called_often(self.trial, self.program, result, faults)]

    def _again(self, state: State, *, accumulates: bool = False) -> Result:
        state.restore()
        self.trial.device.seed(self.trial.case.seed)
        self.program.accumulates = accumulates
        try:
            return self.program.run(self.trial.case.mode)
        finally:
            self.program.accumulates = False

    def _alone(self, state: State) -> Result:
        with undisturbed():
            self.trial.device.synchronize()
            return _on_host(self._again(state))

    def _distract(self, draw: Draw, state: State) -> None:
        """Runs with other inputs, watched, and holds the result, so that an unobserved run that replays it is wrong."""
        trial = self.trial
        other = self._problem(Draw(draw.number + 1))
        with given(trial, self.program, other), trial.technique.watch(trial.device.type):
            self._hold(self.program.run(trial.case.mode))
        state.restore()

    def _hold(self, result: Result) -> None:
        self._held = list if self.program.overwrites else held(self.program, result)

    def _let_go(self, draw: Draw) -> None:
        """Adds faults if the run of a draw changed the held result, and releases that."""
        self.faults += [_drawn(fault, draw) for fault in self._held()]
        self._held = list

    def _placed(self, draw: Draw, problem: Problem) -> Program:
        program = self.trial.place(problem, draw.seed(self.trial.case.seed))
        program.twice = twice(self.trial.technique, self.trial.workload, self.trial.case.mode)
        return program

    def _problem(self, draw: Draw) -> Problem:
        with self.trial.state.restored():
            return draw.problem(self.trial.workload, self.trial.case.seed, self.trial.case.dtype)

    def _prepared(self, draw: Draw) -> Program:
        """Prepares and warms up a program, with its state as drawn; a probe's inputs come later."""
        trial = self.trial
        with trial.clock("prepare"):
            program = self._placed(draw, self._problem(draw))
            if draw.probe:
                program.inputs = self._placed(draw.plain, self._problem(draw.plain)).inputs
            state = State(program)
            trial.prepare(program)
            self._asking = asking(program)
            warm_up(trial, program)
            state.restore()
            trial.device.synchronize()
        return program


@torch.no_grad()
def _refill(program: Program, other: Program, dense: Sequence[bool], *, strided: bool) -> None:
    """Takes over the parameters, buffers, inputs and target of another program of the same workload.

    Tensors are filled in place, in the strides that the technique gave them: compiled code stays valid, and caches by
    address show. Inputs whose elements share memory are replaced; on a device without strides, so are those that were
    not `dense` on the CPU.
    """
    module = other.module
    for name, tensor in [*program.module.named_parameters(), *program.module.named_buffers()]:
        parameter = isinstance(tensor, torch.nn.Parameter)
        tensor.copy_(module.get_parameter(name) if parameter else module.get_buffer(name))
    program.inputs = tuple(
        _renewed(own, new) if whole or (strided and _apart(own)) else new
        for own, new, whole in zip(program.inputs, other.inputs, dense, strict=True)
    )
    program.target, program.further, program.seed = other.target, other.further, other.seed


def _apart(value: Any) -> bool:
    """True for a strided tensor whose elements have memory of their own each."""
    return isinstance(value, Tensor) and not sparse(value) and 0 not in value.stride()


def _renewed(own: Any, new: Any) -> Any:
    if not isinstance(own, Tensor) or own.shape != new.shape:
        return new
    own.detach().copy_(new)
    return own


def _on_host(result: Result) -> Result:
    return {path: tensor.cpu() for path, tensor in result.items()}


def _drawn(fault: Fault, draw: Draw) -> Fault:
    """Names the draw that showed a fault, except for the case's own draw."""
    return fault if draw == FIRST else replace(fault, draw=str(draw))


def _poison(reference: Reference, device: Device) -> None:
    """Fills memory of the outputs' sizes with NaN and frees it, so that stale or unwritten rows show."""
    poisoned = [
        torch.full(layout.shape, float("nan"), dtype=getattr(torch, layout.dtype), device=device.torch_device())
        for layout in reference.layouts.values()
        if getattr(torch, layout.dtype).is_floating_point
    ]
    device.synchronize()
    del poisoned


_SEEN: WeakKeyDictionary[Store, dict[str, Mapping[str, tuple[int, ...]]]] = WeakKeyDictionary()
"""Strides by path, by the run's store and by case without its technique."""


def eager_strides(trial: Trial, draw: Draw = FIRST) -> Mapping[str, tuple[int, ...]]:
    """Returns the strides of eager's outputs on a case's device by path, measured once per process.

    Devices may choose others than the CPU, such as channels-last for convolutions; a technique must keep eager's. Must
    be called before the technique is prepared.
    It is empty where the strides of the CPU hold: on the CPU, on devices without strides, in modes without outputs, and
    where eager does not run on the device, which the case of `eager` reports.
    """
    case, device = trial.case, trial.device
    if device.has("host") or not device.has("strided") or case.mode not in {Mode.FORWARD, Mode.BACKWARD}:
        return {}
    seen = _SEEN.setdefault(trial.store, {})
    key = f"{device.name}/{trial.workload.name}/{case.seed}/{case.dtype}/{case.mode}/{draw}"
    if key not in seen:
        try:
            program = trial.place(draw.problem(trial.workload, case.seed, case.dtype), draw.seed(case.seed))
            result = program.run(case.mode)
            seen[key] = {path: tensor.stride() for path, tensor in result.items() if path.startswith("out")}
        except Exception:  # noqa: BLE001 - eager's own case reports it
            seen[key] = {}
    return seen[key]
