"""Runs a case for its explanation: one draw of its inputs, with every operator noted or computed again."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from accelcheck.checks.trial import State, Trial, warm_up
from accelcheck.core.case import Mode
from accelcheck.explain.budgets import OperatorBudgets
from accelcheck.explain.calls import OperatorCall
from accelcheck.explain.operators import Culprit, OperatorTrace, Recompute, Watcher, together
from accelcheck.explain.places import Places
from accelcheck.verify.oracle_runs import twice
from accelcheck.workloads.probes import Draw

First = Callable[[Culprit, Callable[[OperatorCall], Any]], None]

TURNS, SECONDS = 3, 2.0
"""Fewest turns, and most seconds, in which draws run one after the other until an operator is wrong."""
MODES = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
"""Modes whose results are held to an FP64 oracle, and so can be explained by operators."""


def attempted(
    trial: Trial,
    draw: Draw,
    *,
    first: First | None = None,
    most: int = 1,
    only: int | None = None,
    strict: bool = False,
    watcher: Watcher | None = None,
) -> tuple[OperatorTrace, Exception | None]:
    """Prepare the technique and run the draw once; the dispatched operators, and the exception.

    `first`, `most`, `watcher` and `only` are those of `Recompute`, and `strict` that of `OperatorBudgets`; the operator
    `only` is judged with more samples.
    """
    technique, device, case = trial.technique, trial.device, trial.case
    places = Places()
    holder = replace(holder_of(trial, careful=int(only is not None)), strict=strict)
    mode = Recompute(holder, places, not device.has("host"), first, most, only, watcher or Watcher())
    error: Exception | None = None
    with device.strict_float32():
        try:
            program = trial.place(draw.problem(trial.workload, case.seed, case.dtype), draw.seed(case.seed))
            program.twice = twice(technique, trial.workload, case.mode)
            state = State(program)
            technique.prepare(program, case.mode, device)
            warm_up(trial, program)
            state.restore()
            device.synchronize()
            device.seed(case.seed)
            plain = program.within

            @contextlib.contextmanager
            def within() -> Iterator[None]:
                with plain(), places.followed(program.module), mode:
                    yield

            program.within = within
            program.run(case.mode)
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - a workload, technique or backend may raise anything
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        finally:
            technique.finish()
            trial.state.restore()
    return mode.trace, error


def traced(
    trial: Trial, draw: Draw, *, first: First | None = None, most: int = 1, only: int | None = None
) -> OperatorTrace:
    """Run `attempted`, and raise its exception."""
    trace, error = attempted(trial, draw, first=first, most=most, only=only)
    if error is not None:
        raise error
    return trace


def in_turn(trial: Trial, draws: Sequence[Draw], *, first: First | None = None) -> Culprit | None:
    """Find the first operator that is wrong where these draws run one after the other; None where none is.

    Its errors point one way in all draws, with small samples and with more, or it is wrong in a later turn, since a
    fault may need an earlier run.

    `first` is a function of an operator whose errors point one way, and of a function that runs it: see `Recompute`.
    """
    end = time.monotonic() + SECONDS
    traces = _traces(trial, draws)
    culprit = together(traces)
    if culprit is not None:
        again = [traced(trial, draw, only=culprit.number, first=first if draw == draws[0] else None) for draw in draws]
        if (sure := together(again)) is not None:
            return sure
    turn = 1
    while not any(trace.culprits for trace in traces) and (turn < TURNS or time.monotonic() < end):
        traces, turn = _traces(trial, draws), turn + 1
    return next((culprit for trace in traces for culprit in trace.culprits), None)


def _traces(trial: Trial, draws: Sequence[Draw]) -> list[OperatorTrace]:
    traces = []
    for draw in draws:
        gc.collect()  # so that a draw may get the memory that an earlier one had, as in the case itself
        traces.append(traced(trial, draw))
    return traces


def holder_of(trial: Trial, *, careful: int = 0) -> OperatorBudgets:
    """Budgets of a case's operators."""
    case = trial.case
    return OperatorBudgets(trial.technique.precision(case.dtype), case.dtype, careful)
