"""Runs a case for its explanation: one draw of its inputs, with every operator noted or computed again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelcheck.checks.trial import State, warm_up
from accelcheck.core.case import Mode
from accelcheck.experiments.explain.budgets import Holder
from accelcheck.experiments.explain.operators import Recompute, Trace
from accelcheck.experiments.explain.places import Places
from accelcheck.verify.oracle import twice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelcheck.checks.trial import Trial
    from accelcheck.experiments.explain.calls import Call
    from accelcheck.experiments.explain.operators import Culprit
    from accelcheck.workloads.probes import Draw

MODES = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
"""Modes whose results are held to an FP64 oracle, and so can be explained by operators."""


def traced(
    trial: Trial,
    draw: Draw,
    *,
    first: Callable[[Culprit, Callable[[Call], Any]], None] | None = None,
    most: int = 1,
) -> Trace:
    """Prepare the technique, run the draw once, and return what was dispatched.

    Args:
        trial: Of a mode in `MODES`.
        draw: Of the inputs.
        first, most: As of `Recompute`.

    Raises:
        Exception: What the technique or the workload raises; `Trace.raised` cannot be had then.
    """
    trace, error = attempted(trial, draw, first=first, most=most)
    if error is not None:
        raise error
    return trace


def attempted(
    trial: Trial,
    draw: Draw,
    *,
    first: Callable[[Culprit, Callable[[Call], Any]], None] | None = None,
    most: int = 1,
) -> tuple[Trace, Exception | None]:
    """As `traced`, but what is raised is returned, with what was dispatched before it."""
    technique, device, case = trial.technique, trial.device, trial.case
    places = Places()
    holder = Holder(technique.precision(case.dtype), case.dtype)
    mode = Recompute(holder, places, peers=device.type != "cpu", first=first, most=most)
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
        except Exception as raised:  # noqa: BLE001 - a workload, technique or backend may raise anything: it is what is explained
            error = raised
        finally:
            technique.finish()
            trial.state.restore()
    return mode.trace, error


def with_technique(trial: Trial, name: str, matrix: Any) -> Trial:
    """The same case with another technique of the matrix."""
    return replace(trial, technique=matrix.techniques[name], case=replace(trial.case, technique=name))
