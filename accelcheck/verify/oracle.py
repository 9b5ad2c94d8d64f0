"""FP64 results of workloads and error budgets of candidates, computed once a run for all techniques and processes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from accelcheck.core.case import Case, Mode
from accelcheck.core.clean_process import CleanProcess
from accelcheck.verify import algorithms, few, matched, sample_budgets
from accelcheck.verify.cache import Cache
from accelcheck.verify.effort import AUTO, FULL, SAMPLES, Effort, Size, choose, sized
from accelcheck.verify.oracle_runs import (
    Arithmetic,
    EmulatedTechnique,
    Oracle,
    Source,
    blamed,
    check_repeatable,
    check_truth,
    twice,
)
from accelcheck.verify.reference import InapplicableError, Layout, OracleError, Reference
from accelcheck.verify.sample_budgets import Samples, unlike
from accelcheck.verify.views import SIGNED, VIEWS
from accelcheck.workloads.base import Problem, Program, Result, Workload, flatten
from accelcheck.workloads.dispatch import unfused
from accelcheck.workloads.probes import Draw

REMEMBERED = 64
REMEMBERED_BYTES = 2**28
"""Most references that a process keeps in memory, and most bytes of their tensors: all draws of some cases, which
techniques share one after the other. Others are read from the run's folder again."""

FIRST = Draw()
"""Parameters and inputs of the case itself."""


class Store:
    """References of a run, in a folder shared by all its processes; each is computed once, under a lock.

    Args:
        folder: Trusted folder, private to the run and removed with it.
        clean: Process that computes them; None for this process, which no technique must have changed.
        effort: Effort for user-owned models: one of `accelcheck.core.case.EFFORTS`.
    """

    def __init__(self, folder: Path, clean: CleanProcess | None = None, effort: str = AUTO) -> None:
        self.cache = Cache(folder, clean)
        self.word = effort
        self._sizes: dict[str, Size] = {}
        self._memory: dict[str, Reference] = {}  # the least recently used first

    def get(
        self,
        case: Case,
        technique: EmulatedTechnique,
        workload: Workload,
        draw: Draw = FIRST,
        *,
        careful: int = 0,
        algorithm: str = "",
    ) -> Reference:
        """Reference of a case and a draw of its inputs, computed once.

        `careful` from 1 on takes more samples for its budgets: see `Effort`. `algorithm`, one of
        `accelcheck.verify.algorithms.ALGORITHMS`, takes samples of that class.

        Raises:
            OracleError: The oracle failed, is not finite where it should be, disagrees with eager, or is random.
        """
        precision = technique.precision(case.dtype)
        key = f"{workload.name}/{case.seed}/{case.dtype}/{case.mode}/{precision}/{technique.oracle}/{draw}"
        if twice(technique, workload, case.mode):
            key += "/twice"
        if careful:
            key += f"/careful-{careful}"
        effort = self.effort(case, workload)
        if algorithm:
            key += f"/{algorithm}"
        if effort.reduced:
            key += f"/{effort.name}"
        reference = self._memory.pop(key, None)
        if reference is None:
            arithmetic = Arithmetic.of(technique, case.dtype)
            source = Source(workload, arithmetic, case.seed, case.dtype, case.mode, draw, effort, algorithm)
            if effort.reduced:  # the process that computes needs the memory
                self._memory.clear()
                effort.tidy(cycles=True)
            reference = Reference.from_plain(self.cache.once(key, _plain, source, careful))
        self._memory[key] = reference
        while len(self._memory) > 1 and (
            len(self._memory) > REMEMBERED or sum(kept.bytes for kept in self._memory.values()) > REMEMBERED_BYTES
        ):
            del self._memory[next(iter(self._memory))]
        return reference

    def effort(self, case: Case, workload: Workload) -> Effort:
        """Effort for a case: the full one unless the workload is `given`."""
        if not workload.given or self.word == FULL.name or case.mode not in {Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN}:
            return FULL
        return choose(self.word, self.size(case, workload), case.mode)

    def size(self, case: Case, workload: Workload) -> Size:
        """Size of a workload's problem, measured once for all processes."""
        if workload.name not in self._sizes:
            counts = self.cache.once(f"size/{workload.name}/{case.seed}", sized, workload, case.seed)
            self._sizes[workload.name] = Size(**counts)
        return self._sizes[workload.name]


def _plain(source: Source, careful: int) -> dict[str, Any]:
    try:
        return compute(source, careful).plain()
    finally:
        source.effort.tidy(cycles=True)


def compute(source: Source, careful: int = 0) -> Reference:
    """Runs the oracle, eager and the rounding samples, and derives the budgets.

    Raises:
        OracleError: See `Store.get`.
    """
    try:
        return _compute(source, careful)
    except OracleError as error:
        if other := differing(lambda: source.draw.problem(source.workload, source.seed, source.dtype)):
            raise OracleError(
                f"{source}: the workload's maker gives another {other[0]} when it is called again with the same seed: "
                "draw all random numbers from the generator that it is given, and use no clock, counter or generator "
                "of your own"
            ) from error
        raise


def _compute(source: Source, careful: int) -> Reference:
    spread_over = source.spread() if source.algorithm else {}
    if spread_over is None:
        raise InapplicableError(f"{source}: no operator is of the class {source.algorithm}")
    truth, samples, unclassified = _sampled(source, careful, spread_over)
    source.effort.tidy(cycles=True)
    with blamed(f"{source}: eager {source.dtype} on the CPU"):
        eager = source.repeated(source.dtype) if source.effort.reduced else source.eager(source.dtype)
    groups: matched.Groups = {}
    if source.workload.owned and source.mode is Mode.FORWARD and not source.effort.reduced and not source.algorithm:
        careful, truth, samples, groups = _matched(source, careful, truth, samples, eager)
    eager, _ = matched.aligned(eager, truth, groups, source.unit)
    eager_unlike = _unlike(source, truth, samples, eager)
    alone, unjudged = sample_budgets.of_samples(source, samples.readings, truth, careful)
    peer = _peer(source, eager, truth, groups)
    own = {} if peer is None else {path: samples.sticks[path].read(peer[path]) for path in alone}
    excess = sample_budgets.excess(source, own, samples.readings)
    spread = 1.0
    if source.effort.reduced:
        peers = {path: [*taken, *([own[path]] if path in own else [])] for path, taken in samples.readings.items()}
        spread = few.spread(peers, truth)
        alone = few.widened(alone, samples.readings, truth, source.unit, spread)
    seen = {path: dict(zip(VIEWS, reading.values, strict=True)) for path, reading in own.items()}
    return Reference(
        truth,
        layouts={path: Layout.of(tensor) for path, tensor in eager.items()},
        budgets={path: sample_budgets.with_eager(views, seen.get(path, {})) for path, views in alone.items()},
        leanings={
            path: {view: tuple(reading[view] for reading in taken) for view in SIGNED}
            for path, taken in samples.readings.items()
        },
        unit=source.unit,
        spacing=source.spacing,
        eager_excess=excess,
        alone=alone,
        eager=seen,
        unjudged=unjudged,
        reduced=source.effort.reduced,
        spread=spread,
        unclassified=unclassified,
        spread_over=spread_over,
        noise={path: levels for path, levels in samples.noise(source).items() if path in alone},
        eager_unlike=eager_unlike,
        groups=groups,
    )


def _matched(
    source: Source, careful: int, truth: Result, samples: Samples, eager: Result
) -> tuple[int, Result, Samples, matched.Groups]:
    """Truth and samples with the rows that rounding does not decide, where numbers of rows vary; else as they are.

    All looks take the samples of the first closer one, so that they judge the same rows.
    """
    if not samples.varying() and all(eager[path].shape == truth[path].shape for path in truth if path in eager):
        return careful, truth, samples, {}
    with blamed(f"{source}: the oracle with rounding errors"), unfused(source.dtype):
        oracle = Oracle(source.exactly(), source.mode, source.effort)
        first = (source.draw.seed(source.seed) + 1) * SAMPLES
        others = [eager]
        for index in range(source.effort.count(source.draw, 1)):
            sample = oracle.sample(first + index, source.precision, source.dtype, number=index)
            others.append({path: tensor.clone() for path, tensor in sample.items()})
    if (kept := matched.steady(truth, others, source.unit)) is None:
        return careful, truth, samples, {}
    truth, groups = kept
    again = Samples(truth, source.unit, source.spacing)
    for other in others[1:]:
        again.read(matched.aligned(other, truth, groups, source.unit)[0])
    again.in_range = samples.in_range
    return 1, truth, again, groups


def _sampled(source: Source, careful: int, spread_over: Result) -> tuple[Result, Samples, list[str]]:
    """Result of the oracle, its rounding samples, and the operators whose rounding is not classified."""
    draw, effort, precision, dtype = source.draw, source.effort, source.precision, source.dtype
    traits = source.workload.traits
    with blamed(f"{source}: the FP64 oracle"), unfused(source.dtype):
        oracle = Oracle(source.exactly(), source.mode, effort)
        truth = oracle.run()
        if not effort.reduced:  # else eager is run twice
            check_repeatable(oracle, truth)
        if source.mode is Mode.BACKWARD and draw == FIRST and "custom-function" in traits:
            check_gradients(source.exactly(), twice="twice-differentiable" in traits)
    check_truth(source, oracle, truth)
    samples = Samples(truth, source.unit, source.spacing)
    with blamed(f"{source}: the oracle with rounding errors"), unfused(source.dtype):
        first = (draw.seed(source.seed) + 1) * SAMPLES
        for index in range(effort.count(draw, careful)):
            # No name for the sample: the next one needs its memory.
            samples.read(
                algorithms.admitted(
                    oracle.sample(first + index, precision, dtype, source.algorithm, index), truth, spread_over
                )
            )
            effort.tidy()
        if source.technique.oracle == "float64" and precision == dtype:
            # Half precision may overflow where a fused kernel does not.
            samples.in_range = samples.read(oracle.nearest(dtype), optional=True)
    return truth, samples, sorted(oracle.unclassified)


def _unlike(source: Source, truth: Result, samples: Samples, eager: Result) -> str:
    """Difference of eager from the truth in NaN or infinities: then eager is wrong.

    Raises:
        OracleError: Eager or a sample is unlike the truth in another way.
    """
    who = f"eager {source.dtype} on the CPU"
    # With NaN and infinities among the inputs eager is under test too: some of its own kernels lose them.
    difference = "" if source.draw.special or source.known else unlike(truth, eager)
    wrong = bool(difference) and samples.in_range and not unlike(truth, eager, patterns=False)
    for name, differs in ((who, "" if wrong else difference), ("a rounding sample", samples.unlike)):
        if differs and (varying := samples.varying()):
            raise OracleError(
                f"{source}: rounding decides how large a result is: {varying}, so its elements cannot be compared. "
                "Return what comes before that choice, with a fixed size, to have it judged"
            )
        if differs:
            raise OracleError(f"{source}: the FP64 oracle and {name} disagree: {differs}")
    return difference if wrong else ""


def _peer(source: Source, eager: Result, truth: Result, groups: matched.Groups) -> Result | None:
    """Result of eager in the arithmetic precision; None if there is none, or if it overflows: samples alone then."""
    if source.technique.oracle != "float64" or source.known:
        return None
    peer = eager if source.precision == source.dtype else source.eager_wholly(source.precision)
    if peer is None or (groups and source.precision != source.dtype):
        return None
    return None if not source.draw.special and unlike(truth, peer) else peer


def check_gradients(program: Program, *, twice: bool) -> None:
    """Checks gradients of an FP64 program, and theirs if asked, against finite differences.

    Random directions (``fast_mode``) suffice: the whole Jacobian of a workload would take minutes.

    Args:
        program: Program in FP64, on the CPU.
        twice: True to check second derivatives too.

    Raises:
        torch.autograd.gradcheck.GradcheckError: The gradients differ; the message has both numbers.
    """
    module = program.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    floats = [v for v in program.inputs if isinstance(v, Tensor) and v.is_floating_point()]
    leaves = [value.detach().requires_grad_() for value in floats]

    def call(*values: Any) -> Any:
        fresh = iter(values[: len(leaves)])
        inputs = [next(fresh) if isinstance(v, Tensor) and v.is_floating_point() else v for v in program.inputs]
        return module(*inputs)

    with torch.random.fork_rng(devices=[]):
        # The default generator draws the directions of second derivatives.
        torch.default_generator.manual_seed(0)
        gradcheck(call, (*leaves, *parameters), fast_mode=True)
        if twice:
            gradgradcheck(call, (*leaves, *parameters), fast_mode=True)


def differing(make: Callable[[], Problem]) -> list[str]:
    """Names of the parameters, buffers, inputs and target, such as ``input[0]``, that differ between two calls."""
    first, second = _tensors(make()), _tensors(make())
    return [
        name
        for name in [*first, *(second.keys() - first.keys())]
        if name not in first or name not in second or not _same(first[name], second[name])
    ]


def _tensors(problem: Problem) -> Mapping[str, Tensor]:
    given = {f"input[{index}]": value for index, value in enumerate(problem.inputs)}
    given |= dict(flatten(problem.target, "target")) if problem.target is not None else {}
    named = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    return {**named, **dict(problem.module.named_parameters()), **dict(problem.module.named_buffers())}


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one.detach(), other.detach(), rtol=0.0, atol=0.0, equal_nan=True)
