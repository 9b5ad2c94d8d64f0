"""An explanation for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from accelcheck.explain.compiled import Region
from accelcheck.explain.explain import ENDED, Explanation, OperatorDifference
from accelcheck.explain.operators import Culprit, Seen
from accelcheck.report.console import Table

FAULTS = 5
"""Most lines printed of the verdict, of an operator's figures, and of the operators of a difference."""


def report(explanation: Explanation) -> Iterator[str | Table]:
    """Text that is printed before the script is written."""
    record = explanation.record
    yield f"{record.case.id}: {record.verdict}"
    yield from _cut([f"  {line}" for line in record.why.splitlines()])
    if not explanation.failed:
        why = "" if record.verdict.executed else f": the case did not run ({record.code})"
        yield f"nothing to explain{why}"
        return
    if explanation.layers:
        draw = "all draws" if explanation.draw is None else str(explanation.draw)
        yield f"\nWhich layer ({draw})"
        rows = [
            (layer.name, layer.blames, layer.verdict or "-", f"{layer.used:.3g}" if layer.used else "-", layer.reason)
            for layer in explanation.layers
        ]
        yield Table(("ran", "to blame if it is the first", "verdict", "of budget", "first fault"), rows, right=(3,))
        yield f"=> {explanation.blamed or 'no layer shows the fault with this draw alone'}"
    yield from _operator(explanation)
    yield from (f"note: {note}" for note in explanation.notes)


def _operator(explanation: Explanation) -> Iterator[str | Table]:
    if explanation.record.verdict in ENDED:
        if explanation.draw is None:
            return
        yield "\nWhich operator"
        yield from _ended(explanation)
        return
    trace = explanation.trace
    if trace is None:
        return
    yield "\nWhich operator"
    if explanation.culprit is not None:
        yield from culprit(explanation.culprit, len(trace.seen))
    elif explanation.region is not None:
        yield from _region(explanation.region)
    elif not trace.judged:
        yield f"none of {len(trace.seen)} dispatched could be computed again"
    else:
        yield (
            f"none of {len(trace.seen)} dispatched: {trace.judged} were computed again in FP64 "
            "from the inputs that they had, and each is within the budget of its own rounding"
        )
        yield from _difference(explanation.difference)
    for (name, why), count in sorted(trace.skipped.items()):
        yield f"not judged: {name} x{count}: {why}"


def _ended(explanation: Explanation) -> Iterator[str]:
    last = explanation.ended
    if last is None:
        yield (
            "none had begun: it ends while parameters and inputs are brought to the device, "
            "or while the technique prepares the model"
        )
        return
    when = "the last one that had returned" if last.returned else "it had begun, and not returned"
    yield f"{last.operator}, number {last.number + 1}: {when}"
    yield f"  in {last.place}"
    yield from (f"  tensor {number}: {shape}" for number, shape in enumerate(last.inputs))
    if last.options:
        yield f"  with {last.options}"


def _region(region: Region) -> Iterator[str]:
    number, count = region.number
    where = f", {region.line}" if region.line else ""
    yield f"{region.operator} in the captured {region.stage} graph, number {number + 1} of {count}{where}"
    yield "  compiled up to it, the graph is wrong; compiled up to the operator before it, it is right"
    yield "  the compiler fuses operators: the fault is in the kernel that computes this one"
    yield from _cut([f"  {fault}" for fault in region.faults])


def culprit(wrong: Culprit, count: int) -> Iterator[str | Table]:
    """Name, place, inputs of an operator, and its errors against budgets."""
    yield f"{wrong.operator}, number {wrong.number + 1} of {count}"
    yield f"  in {wrong.place}"
    yield from (f"  tensor {number}: {shape}" for number, shape in enumerate(wrong.inputs))
    if wrong.options:
        yield f"  with {wrong.options}"
    beyond = [figure for figure in wrong.figures if figure.gates and not figure.within]
    if beyond:
        shown = beyond[:FAULTS]
        rows = [(f.path, f.view, f.where, f"{f.measured:.3e}", f"{f.allowed:.3e}", f"{f.used:.3g}") for f in shown]
        yield Table(("result", "view", "where", "error", "budget", "times"), rows, right=(3, 4, 5), indent=2)
    else:
        yield from _cut([f"  {fault}" for fault in wrong.faults])


def all_named(explanation: Explanation) -> list[str]:
    """Names of the wrong operator, or of eager's operators that the technique first replaced; empty for none."""
    found = explanation.culprit or explanation.ended or explanation.region
    if found is not None:
        return [found.operator]
    return [] if explanation.difference is None else [seen.operator for seen in explanation.difference.eager]


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Facts of an explanation as JSON."""
    trace, wrong = explanation.trace, explanation.culprit
    skipped = [] if trace is None else sorted(trace.skipped.items())
    operator = None
    if wrong is not None:
        operator = {
            "name": wrong.operator,
            "number": wrong.number,
            "place": asdict(wrong.place),
            "inputs": [asdict(shape) for shape in wrong.inputs],
            "options": wrong.options,
            "faults": [asdict(fault) for fault in wrong.faults],
        }
    return {
        "case": explanation.record.case.id,
        "verdict": str(explanation.record.verdict),
        "reason": explanation.record.why,
        "draw": None if explanation.draw is None else str(explanation.draw),
        "layers": [asdict(layer) for layer in explanation.layers],
        "blamed": explanation.blamed,
        "operators": 0 if trace is None else len(trace.seen),
        "judged": 0 if trace is None else trace.judged,
        "not_judged": [[name, why, count] for (name, why), count in skipped],
        "named": all_named(explanation),
        "operator": operator,
        "ended": None if explanation.ended is None else asdict(explanation.ended),
        "compiled": None if explanation.region is None else asdict(replace(explanation.region, smallest=None)),
        "notes": explanation.notes,
        "seconds": {"case": explanation.seconds[0], "explanation": explanation.seconds[1]},
    }


def _difference(difference: OperatorDifference | None) -> Iterator[str]:
    if difference is None:
        yield "its operators are eager's: what is wrong changes values between operators, or after the last of them"
        return
    yield "so what is wrong is which operators run. Where they first differ from eager's,"
    yield f"  eager: {_listed(difference.eager)}"
    yield f"  technique: {_listed(difference.technique)}"
    where = next(iter(difference.eager or difference.technique)).place
    yield f"  in {where}"


def _listed(run: Sequence[Seen]) -> str:
    names = [f"{seen.operator}({seen.options})" for seen in run[:FAULTS]]
    more = [f"{len(run) - FAULTS} more"] if len(run) > FAULTS else []
    return ", ".join([*names, *more]) or "nothing"


def _cut(lines: Sequence[str]) -> list[str]:
    more = [f"  ({len(lines) - FAULTS} more)"] if len(lines) > FAULTS else []
    return [*lines[:FAULTS], *more]
