"""Explains a case that ends its process, never ends, or loses its device: the layer, and the operator that was running.

Such a case leaves no result. So every step runs in a process of its own, which notes each operator in shared memory
before it begins; the last note in that memory is the operator that was running when the process ended.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelcheck.core.case import Case, Verdict
from accelcheck.core.clean_process import BEGIN_AGAIN, CleanProcess, CleanProcessError
from accelcheck.explain import layers as of_layers
from accelcheck.explain import runs
from accelcheck.explain.alone import alone
from accelcheck.explain.operators import Seen, Watcher
from accelcheck.explain.source import DATA, Tensors, expression, head, written
from accelcheck.verify.oracle import FIRST
from accelcheck.workloads.probes import Draw, draws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from accelcheck.checks.execute import Bench
    from accelcheck.devices.base import Device
    from accelcheck.explain.calls import OperatorCall
    from accelcheck.explain.explain import Explanation, Steps
    from accelcheck.explain.layers import Layer, Planned
    from accelcheck.explain.trail import Trail


@dataclass(frozen=True)
class Elsewhere:
    """The process that explains.

    Attributes:
        process: Parent of forks; one that died is replaced.
        trail: Memory shared with the forks.
        limit: Seconds after which a step is a hang; None for no limit.
        imports: Modules that a script imports for the device to exist.
        end: Reading of `time.monotonic` at which all steps end.
    """

    process: CleanProcess
    trail: Trail
    limit: float | None
    imports: Sequence[str]
    end: float = math.inf

    def left(self, beginning: float = 0.0) -> float | None:
        """Seconds that the next step may take, with some for Python and torch to start; None for no limit."""
        least = min((self.limit or math.inf) + beginning, max(0.1, self.end - time.monotonic()))
        return least if math.isfinite(least) else None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the bench there; its result."""
        return self.process.call(function, self.process.begun, *arguments, limit=self.left())


def explain_end(there: Elsewhere, explanation: Explanation, bench: Bench, script: Path, steps: Steps) -> list[str]:
    """Add layers and the operator to an explanation; the lines about the script, where one was written.

    `bench` has the case's technique, workload and device; nothing runs with it here.
    """
    case = explanation.record.case
    technique, workload = bench.matrix.techniques[case.technique], bench.matrix.workloads[case.workload]
    if case.mode not in runs.MODES:
        explanation.draw = None
        modes = ", ".join(sorted(runs.MODES))
        explanation.notes.append(f"operators are noted in the modes {modes} only, not in {case.mode}")
        return []
    steps.say("operators")
    for draw in draws(workload, case.mode, technique.admits):
        there.trail.clear()
        why, ended = _noted(there, case, draw)
        if ended:
            explanation.draw, explanation.ended = draw, there.trail.read()
            explanation.notes += [why] if why else []
            break
    else:
        explanation.draw = None
        why = "with each operator noted, no run ends its process: chance, or the time between operators, matters"
        explanation.notes.append(why)
    if steps.layers:
        steps.say("layers")
        chosen = [FIRST] if explanation.draw in {None, FIRST} else [FIRST, explanation.draw]
        plans = of_layers.planned(technique, bench.devices[case.device])
        explanation.layers = [_layer(there, case, plan, chosen) for plan in plans]
    if explanation.ended is None or explanation.ended.returned:
        return []
    steps.say(f"a script of {explanation.ended.operator}")
    try:
        why = there.call(kept, case, explanation.draw, explanation.ended.number, script, there.imports)
    except CleanProcessError as error:
        why = str(error.end or error)
    if why:
        explanation.notes.append(f"no script: {why}")
        return []
    meanings = {0: "the operator returns alone: what ran before it, or beside it, matters"}
    outcome = alone(script, meanings, there.left(BEGIN_AGAIN))
    return [f"\nThe operator alone\n{script}: with the inputs of the case", outcome]


def _noted(there: Elsewhere, case: Case, draw: Draw) -> tuple[str, bool]:
    """Run with each operator noted; the exception's text, and whether the run ended its process or lost its device."""
    try:
        raised: str = there.call(noted, there.trail, case, draw)
    except CleanProcessError as error:
        return ("" if error.end else str(error)), True
    last = there.trail.read()
    ended = bool(raised) and (last is None or not last.returned)
    if ended:
        there.process.renew()  # its effects on the device must not reach the next step
    return raised, ended


def _layer(there: Elsewhere, case: Case, plan: Planned, chosen: Sequence[Draw]) -> Layer:
    try:
        outcome: Layer = there.call(layer, case, plan, chosen)
    except CleanProcessError as error:
        if error.end is None:
            return of_layers.Layer(plan.name, plan.blames, "", str(error))
        return of_layers.Layer(plan.name, plan.blames, error.end.verdict, f"its process {error.end}")
    if outcome.verdict == Verdict.ERROR:
        there.process.renew()
    return outcome


# In the process that explains.


def layer(bench: Bench, case: Case, plan: Planned, chosen: Sequence[Draw]) -> Layer:
    """Run `accelcheck.explain.layers.layer`; any exception is its result."""
    try:
        return of_layers.layer(bench, case, plan, chosen)
    except BaseException as error:  # noqa: BLE001 - `sys.exit` and `pytest.skip` would end the command
        return of_layers.Layer(plan.name, plan.blames, Verdict.ERROR, f"{type(error).__name__}: {error}")


def noted(bench: Bench, trail: Trail, case: Case, draw: Draw) -> str:
    """Run a draw and note each operator; the text of the exception."""
    trial = bench.trial(case)
    _, error = runs.attempted(trial, draw, most=0, watcher=_Noting(trail, trial.device))
    return "" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def kept(bench: Bench, case: Case, draw: Draw, number: int, path: Path, imports: Sequence[str]) -> str:
    """Write a script of one operator of a draw, with its inputs, and run no further; the reason where there is none."""
    trial = bench.trial(case)
    writer = _Writing(number, path, str(trial.device.torch_device()), case.id, imports)
    _, error = runs.attempted(trial, draw, most=0, watcher=writer)
    return "" if writer.wrote else f"the operator does not run again: {error}"


class _Noting(Watcher):
    def __init__(self, trail: Trail, device: Device) -> None:
        self.trail, self.device = trail, device

    def before(self, number: int, seen: Seen, call: OperatorCall) -> None:
        self.trail.begin(number, seen)

    def after(self) -> None:
        self.device.synchronize()  # kernels run later than operators return
        self.trail.returned()


class _WrittenError(Exception):
    """The script is written; going on would end the process."""


class _Writing(Watcher):
    def __init__(self, number: int, path: Path, device: str, case: str, imports: Sequence[str]) -> None:
        self.number, self.path, self.device, self.case, self.imports = number, path, device, case, imports
        self.wrote = False

    def before(self, number: int, seen: Seen, call: OperatorCall) -> None:
        if number != self.number:
            return
        ends = f"{seen.operator} ends its process on {self.device}, or never ends"
        title = f"{ends}; found by: accelcheck explain {self.case}"
        tensors = Tensors(call.tensors(), "given")
        inputs = [*tensors.made()]
        lines = [
            *head(title, ("torch", *self.imports), self.device, tensors.data, self.path.with_suffix(DATA).name),
            *inputs,
            *tensors.moved(),
            f"out = {expression(call, 't')}",
            "for one in [*t, *(out if isinstance(out, (list, tuple)) else [out])]:",
            "    isinstance(one, torch.Tensor) and one.cpu()  # waits for the device",
            f'print("{seen.operator}: returned, torch", torch.__version__)',
        ]
        written(self.path, "\n".join(lines) + "\n", tensors.data)
        self.wrote = True
        raise _WrittenError
