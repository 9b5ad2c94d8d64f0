"""Effort for judging a case: the full one, or less for a large user-owned model.

The oracle of a case runs for each draw, once exactly and several times with simulated rounding errors. A sample of two
training steps of 25 million parameters takes ten seconds: 6 samples of 4 draws would take minutes, and the first shows
most of it. The effort follows from the size of the problem alone, never from speed, so that every machine judges alike.
"""

import dataclasses
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import EFFORTS, Mode
from accelcheck.core.forking import give_back
from accelcheck.devices.flops import flop_counter
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.probes import DRAWS, Draw, quieted

AUTO, FULL_WORD, LEAST_WORD = EFFORTS
LEAST_DRAWS = 3
"""Least draws that are judged together: two beyond their budgets have the same sign by chance in 1 of 4 cases."""
SAMPLES = 6
"""Runs of the oracle with random rounding errors. A seventh exceeds the largest of 6 in 1 of 7 cases, by a factor of 2
practically never: see `accelcheck.verify.precision.SLACK`."""
PROBE_SAMPLES = 3
"""The same for structured inputs, whose faults exceed budgets by orders of magnitude."""
CAREFUL = (32, 128)
"""Samples of the first and second closer look at a candidate that exceeds its budget slightly. A number that spreads as
the samples do exceeds twice the largest of 4 in 4 % of cases, of 7 in 1 %, of 33 in 0.02 % (normal distribution); a run
judges thousands of numbers."""
ELEMENT = 256.0
"""Floating-point operations of an FP64 contraction that take as long as simulating the rounding of one element: on a
core with AVX-512, 40 in a nanosecond against 6 ns."""
RESET = 40.0
"""The same for one parameter that is copied before each run."""
BUDGET = 4e11
"""Operations allowed for the oracle of a case, about 10 s of one such core."""


@dataclass(frozen=True)
class Effort:
    """Draws, samples and steps computed per case.

    Attributes:
        name: Part of the keys of stored references.
        draws: Random draws, `accelcheck.verify.oracle.FIRST` first; fewer than three are not judged together.
        samples: Runs of the oracle with rounding errors for each draw.
        careful: Samples of the first and the second closer look.
        steps: Most optimizer steps of a training; 0 for the problem's own number.
        probes: True to run structured inputs too.
    """

    name: str
    draws: int = DRAWS
    samples: int = SAMPLES
    careful: tuple[int, int] = CAREFUL
    steps: int = 0
    probes: bool = True

    @property
    def reduced(self) -> bool:
        """True for less than the full effort."""
        return self != FULL

    def taken(self, steps: int) -> int:
        """Number of a problem's optimizer steps to take."""
        return min(steps, self.steps) if self.steps else steps

    def chosen(self, draws: Iterable[Draw]) -> list[Draw]:
        """Draws of a case to run."""
        return [draw for draw in draws if draw.number < self.draws and (self.probes or not draw.probe)]

    def count(self, draw: Draw, careful: int) -> int:
        """Samples of a draw; `careful` is 0 without a closer look, 1 for the first, 2 for the second."""
        if careful:
            return self.careful[careful - 1]
        return min(self.samples, PROBE_SAMPLES) if draw.probe else self.samples

    def tidy(self, *, cycles: bool = False) -> None:
        """Returns freed memory to the system where a model is large; `cycles` collects garbage before, in 0.2 s."""
        if not self.reduced:
            return
        if cycles:
            gc.collect()
        give_back()

    def runs(self) -> float:
        """Passes of the oracle: per draw one exact, one rounded to nearest, and two for each sample."""
        return self.draws * (2 + 2.0 * self.samples)


FULL = Effort("full")
PART = Effort("part", draws=2, samples=3, careful=(12, 48))
LEAST = Effort("least", draws=2, samples=2, careful=(8, 24), steps=2, probes=False)


@dataclass(frozen=True)
class Size:
    """Size of a problem.

    Attributes:
        parameters: Elements of the parameters.
        operations: Floating-point operations of a forward pass's contractions, by ``torch.utils.flop_counter``.
        elements: Elements of all results of its operators.
    """

    parameters: int
    operations: float
    elements: float
    steps: int

    def work(self, mode: Mode, steps: int) -> float:
        """Operations of one run: a backward pass counts as two forward passes, an optimizer step as four operators."""
        once = self.operations + ELEMENT * self.elements + RESET * self.parameters
        if mode is Mode.TRAIN:
            return steps * (3 * once + 4 * ELEMENT * self.parameters)
        return 3 * once if mode is Mode.BACKWARD else once

    def __str__(self) -> str:
        parameters, operations, elements = map(_short, (self.parameters, self.operations, self.elements))
        return f"{parameters} parameters, {operations} operations and {elements} elements a pass"


def choose(word: str, size: Size, mode: Mode) -> Effort:
    """Effort for a problem of a user-owned model, by one of `accelcheck.core.case.EFFORTS`."""
    if word == FULL_WORD:
        return FULL
    if word == LEAST_WORD:
        return LEAST
    for effort in (FULL, PART):
        if effort.runs() * size.work(mode, effort.taken(size.steps)) <= BUDGET:
            return effort
    return LEAST


def told(effort: Effort, size: Size, mode: Mode, word: str) -> str:
    """Reductions in words; empty for the full effort."""
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
    """Fields of `Size` of a problem, which may be changed."""
    module = quieted(problem).module.eval()
    elements, flops = _Elements(), flop_counter()
    with torch.no_grad(), flops, elements:
        module(*problem.inputs)
    size = Size(
        sum(parameter.numel() for parameter in module.parameters()),
        float(flops.get_total_flops()),
        elements.count,
        problem.steps,
    )
    return dataclasses.asdict(size)


def sized(workload: Workload, seed: int) -> dict[str, Any]:
    """`size_of` a workload's problem."""
    return size_of(workload.problem(seed))


class _Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Counts the elements of all results of operators that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = out if isinstance(out, (tuple, list)) else (out,)
            self.count += sum(value.numel() for value in results if isinstance(value, Tensor))
        return out


def _short(number: float) -> str:
    for limit, word in ((1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {word}"
    return f"{number:,.0f}"
