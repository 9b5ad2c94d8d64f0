"""The explanation of one case: its verdict, its layers, the operator, and the smallest case."""

from __future__ import annotations

import difflib
import itertools
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accelcheck.core.case import Case, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.explain import compiled, fused, runs
from accelcheck.explain import layers as of_layers
from accelcheck.explain.smallest import Shrinker, Smallest, SmallestRuns, smallest_runs
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.verify.oracle import FIRST
from accelcheck.workloads.probes import Draw, draws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelcheck.checks.execute import Bench
    from accelcheck.checks.trial import Trial
    from accelcheck.core.journal import Record
    from accelcheck.explain.calls import OperatorCall
    from accelcheck.explain.compiled import Region
    from accelcheck.explain.layers import Layer
    from accelcheck.explain.operators import Culprit, OperatorTrace, Seen
    from accelcheck.explain.parts import SmallestPart
    from accelcheck.explain.trail import Last


DRAWS = 4
"""Most failing draws in which a wrong operator is looked for."""
ENDED = frozenset({Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST})
"""Verdicts after which a process is of no use; `accelcheck.explain.ended` explains them."""
FAILED = ENDED | {Verdict.FAIL, Verdict.ERROR}
"""Verdicts that are explained."""


@dataclass(frozen=True)
class OperatorDifference:
    """The first place where a technique runs other operators than eager: those of both, of which one may have none."""

    eager: tuple[Seen, ...]
    technique: tuple[Seen, ...]


@dataclass
class Explanation:
    """Findings about why a case failed.

    Attributes:
        draw: Draw of the inputs that the rest is about; None where no draw fails alone, but all of them together.
        layers: The case in each layer; empty where the verdict is no failure of values.
        trace: Operators that the run dispatched; None where it was not traced.
        culprit: First wrong operator; None where none is.
        difference: First difference from eager's operators; None where there is none, or an operator is wrong.
        region: First wrong cut of a compiled graph; None where nothing is compiled, or no cut is wrong.
        smallest: The wrong operator or part of a compiled graph alone; None where there is none, or it is right alone.
        ended: Last operator that began in a run that ended or hung its process; None where none did.
        notes: Sentences about what could not be found, and why.
        seconds: Wall time of the case, and of the explanation.
    """

    record: Record
    draw: Draw | None = FIRST
    layers: list[Layer] = field(default_factory=list)
    trace: OperatorTrace | None = None
    culprit: Culprit | None = None
    difference: OperatorDifference | None = None
    region: Region | None = None
    smallest: Smallest | SmallestRuns | SmallestPart | None = None
    ended: Last | None = None
    notes: list[str] = field(default_factory=list)
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def failed(self) -> bool:
        """True if there is a failure to explain."""
        return self.record.verdict in FAILED

    @property
    def blamed(self) -> str:
        """The layer at fault; empty where no layer shows the fault."""
        return of_layers.blamed(self.layers)


def explain(
    bench: Bench,
    case: Case,
    say: Callable[[str], None] = lambda _: None,
    *,
    with_layers: bool = True,
    ran: tuple[Record, float] | None = None,
    shrinking: float = math.inf,
) -> Explanation:
    """Run a case, or take its record and seconds if it `ran` already, and find out why it fails.

    `say` is called with each next step, and `shrinking` limits the seconds for shrinking a wrong operator or graph.
    """
    began = time.monotonic()
    if ran is None:
        say("the case itself")
        ran = bench.run(case), time.monotonic() - began
        began += ran[1]
    explanation = Explanation(ran[0])
    if explanation.failed:
        _explained(bench, case, explanation, Steps(say, with_layers, shrinking))
    explanation.seconds = ran[1], time.monotonic() - began
    return explanation


@dataclass(frozen=True)
class Steps:
    """The steps of an explanation: a function of each next one, if other layers run, and most seconds for shrinking."""

    say: Callable[[str], None]
    layers: bool
    shrinking: float


def _explained(bench: Bench, case: Case, explanation: Explanation, steps: Steps) -> None:
    if case.mode not in runs.MODES:
        explanation.notes.append(
            f"{case.mode} is not judged tensor by tensor against an FP64 oracle: layers and operators of "
            f"{', '.join(sorted(runs.MODES))} alone are explained. The reason above is all that is known."
        )
        return
    if explanation.record.verdict is Verdict.FAIL and not _values(explanation.record):
        explanation.notes.append(
            "no value is wrong: the technique gave no evidence that it ran. No layer or operator explains that."
        )
        return
    technique, workload = bench.matrix.techniques[case.technique], bench.matrix.workloads[case.workload]
    known = draws(workload, case.mode, technique.admits)
    failing = failing_draws(explanation.record, known)
    explanation.draw = failing[0] if failing else None
    if steps.layers:
        steps.say("layers")
        chosen = [FIRST, *(draw for draw in failing[:1] if draw != FIRST)] if failing else _random(known)
        explanation.layers = of_layers.layers(bench, case, chosen)
    trial = bench.trial(case)
    error = _operators(trial, failing, known, explanation, steps)
    if explanation.culprit is not None and explanation.smallest is None:
        explanation.notes.append(_no_smallest(explanation.culprit))
    if explanation.culprit is None and error is None:
        _beyond_operators(trial, bench, explanation, steps)


def _operators(
    trial: Trial, failing: Sequence[Draw], known: Sequence[Draw], explanation: Explanation, steps: Steps
) -> Exception | None:
    """Look for a wrong operator, in one failing draw after the other, then in all random ones; the run's exception."""
    steps.say("operators")
    # First with a function held to its usual formula; where eager itself fails with one, to the case's budget.
    for strict, draw in itertools.product((False, True), _telling(failing) or [FIRST]):
        if strict and not (trial.technique.name == of_layers.EAGER and _elementwise(explanation)):
            break
        error = _traced(trial, draw, explanation, steps, strict=strict)
        if explanation.culprit is not None or error is not None:
            explanation.draw = draw
            return error
    explanation.culprit = _together(trial, _random(known), explanation)
    return None


def _beyond_operators(trial: Trial, bench: Bench, explanation: Explanation, steps: Steps) -> None:
    """Look into cuts of the compiled graph, or at differences from eager, where each dispatched operator is right."""
    technique = trial.technique
    if issubclass(technique.watch, ProfilerLog):
        steps.say("the compiled graph, cut after one operator after the other")
        cut = compiled.region(trial, explanation.draw or FIRST, steps.shrinking)
        if isinstance(cut, str):
            explanation.notes.append(cut)
        else:
            explanation.region, explanation.smallest = cut, cut.smallest
            explanation.notes += (
                [] if cut.smallest else ["no script: no single result of the cut is wrong when it alone is compiled"]
            )
    elif explanation.trace is not None and not explanation.trace.judged:
        explanation.notes.append("no operator was seen: other processes show none")
    elif technique.name != of_layers.EAGER:
        explanation.difference = _difference(trial, bench, explanation)


def _elementwise(explanation: Explanation) -> bool:
    """True if a function ran that `OperatorBudgets.strict` is about."""
    operators = explanation.trace.seen if explanation.trace else []
    names = {seen.operator.partition(".")[0].rpartition("::")[2] for seen in operators}
    return bool(names & fused.ELEMENTWISE)


def _telling(failing: Sequence[Draw]) -> list[Draw]:
    """Draws whose operators are judged: the first, then structured ones, which show other faults, then random ones."""
    return [*failing[:1], *sorted(failing[1:], key=lambda draw: not draw.probe)][:DRAWS]


def _traced(trial: Trial, draw: Draw, explanation: Explanation, steps: Steps, *, strict: bool) -> Exception | None:
    """Judge the operators of one draw, and shrink the first wrong one while it can be called; the run's exception."""
    shrunk: list[Smallest | None] = []
    peers = not trial.device.has("host")

    def first(culprit: Culprit, run: Callable[[OperatorCall], Any]) -> None:
        steps.say(f"the smallest case of {culprit.operator}")
        if culprit.call is not None:
            holder = replace(runs.holder_of(trial), strict=strict)
            shrunk.append(Shrinker(holder, run, peers=peers, seconds=steps.shrinking).shrink(culprit.call))

    trace, error = runs.attempted(trial, draw, first=first, strict=strict)
    explanation.trace = trace
    explanation.culprit = next(iter(trace.culprits), None)
    explanation.smallest = next(iter(shrunk), None)
    if error is not None:
        where = f"{type(error).__name__}{f' in {trace.raised}' if trace.raised else ''}"
        explanation.notes.append(f"the run raised {where}; operators dispatched until then: {len(trace.seen)}")
    return error


def failing_draws(record: Record, known: Sequence[Draw]) -> list[Draw]:
    """The draws that a record's faults name, in order; empty where only all of them together show a fault."""
    shown = {fault.draw for fault in _values(record) if not _together_only(fault)}
    return [draw for draw in known if ("" if draw == FIRST else str(draw)) in shown]


def _values(record: Record) -> list[Fault]:
    """The faults of a record that are about values."""
    return [fault for fault in record.faults if fault.kind is not FaultKind.EVIDENCE]


def _together_only(fault: Fault) -> bool:
    return "in all draws" in fault.view


def _random(known: Sequence[Draw]) -> list[Draw]:
    return [draw for draw in known if not draw.probe]


def _together(trial: Trial, chosen: Sequence[Draw], explanation: Explanation) -> Culprit | None:
    """Find an operator whose errors point one way in every draw, or that is wrong when draws follow one another."""
    made: list[SmallestRuns | None] = []

    def first(culprit: Culprit, run: Callable[[OperatorCall], Any]) -> None:
        if culprit.call is not None:
            holder, peers = runs.holder_of(trial, careful=1), not trial.device.has("host")
            made.append(smallest_runs(holder, run, culprit.call, peers=peers))

    try:
        culprit = runs.in_turn(trial, chosen, first=first)
    except Exception as error:  # noqa: BLE001 - a workload, technique or backend may raise anything
        explanation.notes.append(f"other draws raised {type(error).__name__}: {error}")
        return None
    explanation.smallest = next(iter(made), None) if culprit is not None and _leans(culprit) else None
    return culprit


def _leans(culprit: Culprit) -> bool:
    return any(map(_together_only, culprit.faults))


def _no_smallest(culprit: Culprit) -> str:
    if culprit.call is None or _leans(culprit):
        return "no script: what is wrong shows in several runs together, not in one call of the operator"
    why = "is right when it is called again with the same inputs; what ran before it matters, or chance"
    return f"no script: {culprit.operator} {why}"


def _difference(trial: Trial, bench: Bench, explanation: Explanation) -> OperatorDifference | None:
    """Compare with eager's operators: the technique's replacement is then wrong, not an operator."""
    eager = bench.matrix.techniques.get(of_layers.EAGER)
    if eager is None or explanation.trace is None:
        return None
    case = replace(trial.case, technique=eager.name)
    plain, error = runs.attempted(replace(trial, technique=eager, case=case), explanation.draw or FIRST, most=0)
    if error is not None:
        explanation.notes.append(f"eager raised {type(error).__name__}: its operators cannot be compared")
        return None
    return difference(plain.seen, explanation.trace.seen)


def difference(eager: Sequence[Seen], technique: Sequence[Seen]) -> OperatorDifference | None:
    """Find where two sequences of operators first differ in names or options; None where they do not.

    A place that lacks operators of eager's comes before one that only adds some, such as casts.
    """
    # Operators without inputs, such as those that draw output gradients, are no work of the model.
    eager, technique = ([seen for seen in run if seen.inputs] for run in (eager, technique))
    eager_names, technique_names = ([(seen.operator, seen.options) for seen in run] for run in (eager, technique))
    matcher = difflib.SequenceMatcher(a=eager_names, b=technique_names, autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    if not changes:
        return None
    _, i, j, k, m = next((code for code in changes if code[2] > code[1]), changes[0])
    return OperatorDifference(tuple(eager[i:j]), tuple(technique[k:m]))
