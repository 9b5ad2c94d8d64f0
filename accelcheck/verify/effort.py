"""How much is computed to judge a case: all that is usual, or, of somebody's own large model, what its size allows.

The oracle of a case runs once exactly and some times with simulated rounding errors, for each draw. Of a model with 25 million parameters a
sample of two training steps takes ten seconds: 6 samples of 4 draws would take minutes, and most of what they show is shown by the first.
The effort follows from the size of the problem alone, never from the speed of a machine, so that a case is judged alike everywhere.
"""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import EFFORTS, Mode
from accelcheck.core.forking import give_back
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.workloads.probes import DRAWS, quieted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from accelcheck.workloads.base import Problem, Workload
    from accelcheck.workloads.probes import Draw

AUTO, FULL_WORD, LEAST_WORD = EFFORTS
LEAST_DRAWS = 3
"""Fewer point the same way by chance too often: 1 of 4 times for two draws, given that both are beyond their budget."""
SAMPLES = 6
"""Runs of the oracle with random rounding errors. The largest of 6 is exceeded by a seventh in 1 of 7 cases, by a factor
of 2 practically never: see `accelcheck.verify.precision.SLACK`."""
PROBE_SAMPLES = 3
"""The same for structured inputs, whose faults show by orders of magnitude."""
CAREFUL = (32, 128)
"""Numbers of samples when a candidate exceeds its budget slightly: the second where it still does with the first. A number that
spreads as the samples do exceeds twice the largest of 4 in 4 % of cases, of 7 in 1 %, of 33 in 0.02 % (normal distribution); a
run judges thousands of numbers."""
ELEMENT = 256.0
"""Floating-point operations of a contraction in FP64 that take as long as the simulated rounding of one element of a result: on a core with
AVX-512, 40 in a nanosecond against 6 ns."""
RESET = 40.0
"""The same of one parameter that is copied before each run."""
BUDGET = 4e11
"""Operations that the oracle of a case may take, about 10 s of one such core."""


@dataclass(frozen=True)
class Effort:
    """How often what is computed for a case.

    Attributes:
        name: Part of the keys of stored references.
        draws: Random draws, `accelcheck.verify.oracle.FIRST` first; fewer than three say nothing together.
        samples: Runs of the oracle with rounding errors for each draw.
        careful: Runs for a closer look at what exceeds its budget, and for a second one.
        steps: Most optimizer steps of a training; 0 for as many as the problem has.
        probes: Whether structured inputs are run too.
    """

    name: str
    draws: int = DRAWS
    samples: int = SAMPLES
    careful: tuple[int, int] = CAREFUL
    steps: int = 0
    probes: bool = True

    @property
    def reduced(self) -> bool:
        """Whether it is less than what is usual."""
        return self != FULL

    def taken(self, steps: int) -> int:
        """How many of a problem's optimizer steps are taken."""
        return min(steps, self.steps) if self.steps else steps

    def chosen(self, draws: Iterable[Draw]) -> list[Draw]:
        """Those of all draws of a case that are run."""
        return [draw for draw in draws if draw.number < self.draws and (self.probes or not draw.probe)]

    def count(self, draw: Draw, careful: int) -> int:
        """Samples of a draw; from `careful` 1 on for the first closer look, and so on."""
        if careful:
            return self.careful[careful - 1]
        return min(self.samples, PROBE_SAMPLES) if draw.probe else self.samples

    def tidy(self, *, cycles: bool = False) -> None:
        """Give freed memory back to the system, where a model is large; with `cycles`, a model that refers to itself is freed first, in 0.2 s."""
        if not self.reduced:
            return
        if cycles:
            gc.collect()
        give_back()

    def runs(self) -> float:
        """Passes of the oracle: for each draw the exact one, one that rounds to nearest, and samples, which take two each."""
        return self.draws * (2 + 2.0 * self.samples)


FULL = Effort("full")
PART = Effort("part", draws=2, samples=3, careful=(12, 48))
LEAST = Effort("least", draws=2, samples=2, careful=(8, 24), steps=2, probes=False)


@dataclass(frozen=True)
class Size:
    """Of a problem.

    Attributes:
        parameters: Elements of the parameters.
        operations: Floating-point operations of the contractions of a forward pass, as ``torch.utils.flop_counter`` counts them.
        elements: Elements of all results of its operators.
        steps: Optimizer steps.
    """

    parameters: int
    operations: float
    elements: float
    steps: int

    def work(self, mode: Mode, steps: int) -> float:
        """Of one run, in operations: a backward pass has twice the work of a forward pass, a step of an optimizer four operators."""
        once = self.operations + ELEMENT * self.elements + RESET * self.parameters
        if mode is Mode.TRAIN:
            return steps * (3 * once + 4 * ELEMENT * self.parameters)
        return 3 * once if mode is Mode.BACKWARD else once

    def __str__(self) -> str:
        return f"{_short(self.parameters)} parameters, {_short(self.operations)} operations and {_short(self.elements)} elements a pass"


def choose(word: str, size: Size, mode: Mode) -> Effort:
    """The effort for a problem of somebody's own model.

    Args:
        word: One of `accelcheck.core.case.EFFORTS`.
        size: Of the problem.
        mode: Of the case.
    """
    if word == FULL_WORD:
        return FULL
    if word == LEAST_WORD:
        return LEAST
    for effort in (FULL, PART):
        if effort.runs() * size.work(mode, effort.taken(size.steps)) <= BUDGET:
            return effort
    return LEAST


def told(effort: Effort, size: Size, mode: Mode, word: str) -> str:
    """What was reduced, for people; empty where nothing was."""
    if not effort.reduced:
        return ""
    parts = [f"{effort.draws} of {FULL.draws} draws"] if effort.draws < FULL.draws else []
    parts += [f"{effort.samples} of {FULL.samples} samples of rounding errors"]
    if mode is Mode.TRAIN and effort.taken(size.steps) < size.steps:
        parts.append(f"{effort.taken(size.steps)} of {size.steps} steps")
    if effort.draws < LEAST_DRAWS:
        parts.append("no judgement over all draws together")
    if not effort.probes:
        parts.append("no probes")
    why = "--accel-effort=least" if word == LEAST_WORD else str(size)
    return f"{', '.join(parts)}: {why}"


def size_of(problem: Problem) -> dict[str, Any]:
    """The fields of `Size`, of a problem, which it may change."""
    from torch.utils.flop_counter import FlopCounterMode

    module = quieted(problem).module.eval()
    elements, flops = _Elements(), FlopCounterMode(display=False)
    with torch.no_grad(), flops, elements:
        module(*problem.inputs)
    found = Size(
        sum(parameter.numel() for parameter in module.parameters()),
        float(flops.get_total_flops()),
        elements.count,
        problem.steps,
    )
    return dataclasses.asdict(found)


def sized(workload: Workload, seed: int) -> dict[str, Any]:
    """`size_of` a workload's problem."""
    return size_of(workload.problem(seed))


class _Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Counts the elements of all results of operators that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.count = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results: Sequence[Any] = out if isinstance(out, (tuple, list)) else (out,)
        if not func.is_view:
            self.count += sum(value.numel() for value in results if isinstance(value, Tensor))
        return out


def _short(number: float) -> str:
    for limit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {word}"
    return f"{number:,.0f}"
