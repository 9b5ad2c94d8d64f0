"""The FP64 result of a workload and the error budgets of a candidate: computed once a run, shared by techniques and processes."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from accelcheck.core.case import Mode
from accelcheck.verify import caps, few, gradients, room
from accelcheck.verify.cache import Cache
from accelcheck.verify.effort import AUTO, FULL, SAMPLES, Effort, Size, choose, sized
from accelcheck.verify.precision import SLACK, SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.rounding import Nearest, Rounding
from accelcheck.verify.unfused import unfused
from accelcheck.verify.views import SIGNED, VIEWS, Reading, Yardstick, budget
from accelcheck.workloads.base import Program, Result, flatten, is_float
from accelcheck.workloads.probes import Draw
from accelcheck.workloads.repeatable import differing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor, nn

    from accelcheck.core.case import Case
    from accelcheck.core.clean_process import CleanProcess
    from accelcheck.workloads.base import OptimizerMaker, Workload

TRUST = 4.0
"""Eager may err this many times more than the rounding samples before the oracle, or eager, is taken to be wrong. Over all
built-in workloads, dtypes and modes on the CPU the largest ratio is 1.5, the median 0.3; a library that sums in another order
may show more, a wrong oracle shows orders of magnitude. `eager_excess` in the journal has it for each case."""


_NO_KERNEL = re.compile(r"not implemented for|scalar type|dtype")
"""Torch's messages for an operator without a CPU kernel for a dtype, or a workload with constants in another one."""
REMEMBERED = 64
REMEMBERED_BYTES = 2**28
"""References that a process keeps in memory, and the bytes of their tensors: all draws of some cases, which techniques share one
after the other. A further one is read from the run's folder again."""

FIRST = Draw()
"""The case's own parameters and inputs."""


class OracleError(RuntimeError):
    """The oracle failed or cannot be trusted: the case is an `error`, never a pass."""


class VacuousError(OracleError):
    """Rounding errors alone decide a tensor: its budget would let any fault pass."""


@dataclass(frozen=True)
class Layout:
    """Metadata that eager gives a tensor of the result: name of the torch dtype, shape, strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """The reference that a candidate is compared with.

    Attributes:
        truth: The FP64 oracle's result by path.
        layouts: Metadata of FP32 (or storage dtype) eager on the CPU, by path.
        budgets: Allowed error by path and view, in the view's unit; none for paths without elements or of integers.
        leanings: What the rounding samples show in the signed views, by path and view.
        unit: Unit roundoff of the arithmetic precision.
        spacing: Distance of its numbers around 0.
        eager_excess: Largest ratio of eager's own error to the rounding samples', over paths, all elements together: shows that
            the samples explain eager.
        alone: Budgets from the rounding samples alone.
        unjudged: Why tensors are not judged, by path: see `accelcheck.workloads.base.Workload.given`.
        eager: What eager itself shows, by path and view; empty where there is none to compare with. In the views where this is
            within the budget of the samples alone, it enters `budgets`; beyond, it widens nothing.
        reduced: Whether it has less than the usual samples: see `accelcheck.verify.effort`.
        spread: Where it is reduced: see `accelcheck.verify.few.spread`.
    """

    truth: Result
    layouts: Mapping[str, Layout]
    budgets: Mapping[str, Mapping[str, float]]
    leanings: Mapping[str, Mapping[str, tuple[float, ...]]]
    unit: float
    spacing: float
    eager_excess: float
    alone: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    eager: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    unjudged: Mapping[str, str] = field(default_factory=dict)
    reduced: bool = False
    spread: float = 1.0

    @functools.cached_property
    def without_eager(self) -> Reference:
        """The same with budgets from the samples alone: eager on the CPU is no peer of itself."""
        other = replace(self, budgets=self.alone, eager={})
        vars(other)["sticks"] = self.sticks
        return other

    @property
    def summary(self) -> Reference:
        """The same without tensors: what is judged of several draws together needs none."""
        return replace(self, truth={}, layouts={})

    @functools.cached_property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.truth.values())

    @functools.cached_property
    def sticks(self) -> Mapping[str, Yardstick]:
        """A `Yardstick` for each path that has a budget."""
        return {path: Yardstick(self.truth[path], self.unit, self.spacing) for path in self.budgets}


def _unchanged(value: Any, *_: Any) -> Any:
    return value


class EmulatedTechnique(Protocol):
    """The members of a technique that decide which results are right."""

    @property
    def oracle(self) -> str: ...
    @property
    def differentiates_twice(self) -> bool: ...
    def precision(self, dtype: str, /) -> str: ...
    def emulate(self, module: nn.Module, inputs: tuple[Any, ...], /) -> nn.Module: ...
    def emulate_optimizer(self, make: OptimizerMaker, /) -> OptimizerMaker: ...


@dataclass(frozen=True)
class Arithmetic:
    """What a reference depends on of a technique; it can be sent to the clean process, where no technique is ever prepared.

    Attributes:
        arithmetic: The precision of its arithmetic for the case's storage dtype.
        oracle, differentiates_twice, emulate, emulate_optimizer: The technique's own.
    """

    arithmetic: str
    oracle: str
    differentiates_twice: bool
    emulate: Callable[[nn.Module, tuple[Any, ...]], nn.Module]
    emulate_optimizer: Callable[[OptimizerMaker], OptimizerMaker]

    @classmethod
    def of(cls, technique: EmulatedTechnique, dtype: str) -> Self:
        """Of a technique, for a storage dtype."""
        emulates = technique.oracle != "float64"
        return cls(
            technique.precision(dtype),
            technique.oracle,
            technique.differentiates_twice,
            technique.emulate if emulates else _unchanged,
            technique.emulate_optimizer if emulates else _unchanged,
        )

    def precision(self, dtype: str) -> str:
        """As `Technique.precision`, for the dtype that this was made for."""
        del dtype
        return self.arithmetic


def twice(technique: EmulatedTechnique, workload: Workload, mode: Mode) -> bool:
    """Whether gradients of gradients are part of the result."""
    return mode is Mode.BACKWARD and technique.differentiates_twice and "twice-differentiable" in workload.traits


class Store:
    """References of a run, in a folder that all its processes share; each is computed once, under a lock.

    Args:
        folder: Private to the run and trusted; removed with it.
        clean: Where they are computed; by default in this process, which no technique must have changed.
        effort: How much is computed for somebody's own model: one of `accelcheck.core.words.EFFORTS`.
    """

    def __init__(self, folder: Path, clean: CleanProcess | None = None, effort: str = AUTO) -> None:
        self.cache = Cache(folder, clean)
        self.word = effort
        self._sizes: dict[str, Size] = {}
        self._memory: dict[str, Reference] = {}  # the last ones used, those least lately used first

    def get(
        self, case: Case, technique: EmulatedTechnique, workload: Workload, draw: Draw = FIRST, *, careful: int = 0
    ) -> Reference:
        """The reference of a case and a draw of its inputs; with `careful` from 1 on, its budgets come from more samples: see `Effort`.

        Raises:
            OracleError: The oracle failed, is not finite where it should be, disagrees with eager, or is random.
        """
        precision = technique.precision(case.dtype)
        key = f"{case.workload}/{case.seed}/{case.dtype}/{case.mode}/{precision}/{technique.oracle}/{draw}"
        if twice(technique, workload, case.mode):
            key += "/twice"
        if careful:
            key += f"/careful-{careful}"
        effort = self.effort(case, workload)
        if effort.reduced:
            key += f"/{effort.name}"
        found = self._memory.pop(key, None)
        if found is None:
            arithmetic = Arithmetic.of(technique, case.dtype)
            arguments = workload, arithmetic, case.seed, case.dtype, case.mode, draw, careful, effort
            if effort.reduced:  # the process that computes needs the memory
                self._memory.clear()
                effort.tidy(cycles=True)
            found = _reference(self.cache.once(key, _computed, *arguments))
        self._memory[key] = found
        while len(self._memory) > 1 and (
            len(self._memory) > REMEMBERED or sum(kept.bytes for kept in self._memory.values()) > REMEMBERED_BYTES
        ):
            del self._memory[next(iter(self._memory))]
        return found

    def effort(self, case: Case, workload: Workload) -> Effort:
        """How much is computed for a case: all that is usual unless the workload is somebody's own model."""
        if not workload.given or self.word == FULL.name or case.mode not in {Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN}:
            return FULL
        return choose(self.word, self.size(case, workload), case.mode)

    def size(self, case: Case, workload: Workload) -> Size:
        """Of a workload's problem: measured once for all processes."""
        if workload.name not in self._sizes:
            found = self.cache.once(f"size/{workload.name}/{case.seed}", sized, workload, case.seed)
            self._sizes[workload.name] = Size(**found)
        return self._sizes[workload.name]


def _computed(
    workload: Workload,
    arithmetic: Arithmetic,
    seed: int,
    dtype: str,
    mode: Mode,
    draw: Draw,
    careful: int,
    effort: Effort,
) -> dict[str, Any]:
    try:
        return _plain(compute(workload, arithmetic, seed, dtype, mode, draw, careful=careful, effort=effort))
    finally:
        effort.tidy(cycles=True)


def compute(
    workload: Workload,
    technique: EmulatedTechnique,
    seed: int,
    dtype: str,
    mode: Mode,
    draw: Draw = FIRST,
    *,
    careful: int = 0,
    effort: Effort = FULL,
) -> Reference:
    """The oracle, eager, the rounding samples, and the budgets that follow.

    Raises:
        OracleError: As for `Store.get`.
    """
    source = _Source(workload, technique, seed, dtype, mode, draw, effort)
    try:
        return _compute(source, careful)
    except OracleError as error:
        if other := differing(lambda: draw.problem(workload, seed, dtype)):
            raise OracleError(
                f"{source}: the workload's maker gives another {other[0]} when it is called again with the same seed: draw all random "
                "numbers from the generator that it is given, and use no clock, counter or generator of your own"
            ) from error
        raise


def _compute(source: _Source, careful: int) -> Reference:
    workload, technique, seed = source.workload, source.technique, source.seed
    dtype, mode, draw, effort = source.dtype, source.mode, source.draw, source.effort
    precision = technique.precision(dtype)
    unit, spacing = UNIT_ROUNDOFF[precision], SMALLEST_SUBNORMAL[precision]

    with _blamed(f"{source}: the FP64 oracle"), unfused():
        oracle = _Oracle(source.exactly(), mode, effort)
        truth = oracle.run()
        if not effort.reduced:  # else eager is run twice
            _check_repeatable(oracle, truth)
        if mode is Mode.BACKWARD and draw == FIRST and "custom-function" in workload.traits:
            gradients.check(source.exactly(), twice="twice-differentiable" in workload.traits)
    _check_truth(source, oracle, truth)
    judged = {path: Yardstick(t, unit, spacing) for path, t in truth.items() if t.is_floating_point() and t.numel()}

    taken = _Taken(truth, judged)
    with _blamed(f"{source}: the oracle with rounding errors"), unfused():
        first = (draw.seed(seed) + 1) * SAMPLES
        for index in range(effort.count(draw, careful)):
            taken.read(oracle.sample(first + index, precision, dtype))
            effort.tidy()
        if technique.oracle == "float64" and precision == dtype:
            taken.read(
                oracle.nearest(dtype), optional=True
            )  # half precision may overflow where a fused kernel does not
    del oracle
    effort.tidy(cycles=True)
    with _blamed(f"{source}: eager {dtype} on the CPU"):
        eager = source.repeated(dtype) if effort.reduced else source.eager(dtype)
    # With NaN and infinities among the inputs eager is under test too: some of its own kernels lose them.
    unlike = "" if draw.special else _unlike(truth, eager)
    _check_alike(source, {f"eager {dtype} on the CPU": unlike, "a rounding sample": taken.unlike})
    alone, unjudged = _alone(source, taken.readings, truth, unit, careful)
    excess, own = 0.0, dict[str, Reading]()
    if technique.oracle == "float64":
        peer = eager if precision == dtype else source.eager_wholly(precision)
        # Eager wholly in half precision may overflow: samples alone then.
        if peer is not None and (draw.special or not _unlike(truth, peer)):
            own = {path: judged[path].read(peer[path]) for path in alone}
            excess = _trusted(
                f"{source}: eager {precision} on the CPU", own, taken.readings, unit, lenient=effort.reduced
            )
    spread = 1.0
    if effort.reduced:
        peers = {path: [*taken.readings[path], *([own[path]] if path in own else [])] for path in taken.readings}
        spread = few.spread(peers, truth)
        alone = few.widened(alone, taken.readings, truth, unit, spread)
    seen = {path: dict(zip(VIEWS, reading.values, strict=True)) for path, reading in own.items()}
    budgets = {path: _with_eager(views, seen.get(path, {})) for path, views in alone.items()}
    leanings = {
        path: {view: tuple(r[view] for r in peers) for view in SIGNED} for path, peers in taken.readings.items()
    }
    return Reference(
        truth,
        _layouts(eager),
        budgets,
        leanings,
        unit,
        spacing,
        excess,
        alone,
        seen,
        unjudged,
        reduced=effort.reduced,
        spread=spread,
    )


@dataclass(frozen=True)
class _Source:
    """Makes the program of a draw, afresh for each run."""

    workload: Workload
    technique: EmulatedTechnique
    seed: int
    dtype: str
    mode: Mode
    draw: Draw
    effort: Effort = FULL

    def __str__(self) -> str:
        return f"{self.workload.name} ({self.draw})"

    def program(self, dtype: str) -> Program:
        """Wholly in a dtype."""
        problem = self.draw.problem(self.workload, self.seed, self.dtype)
        program = Program.of(problem, dtype=getattr(torch, dtype), seed=self.draw.seed(self.seed))
        program.twice = twice(self.technique, self.workload, self.mode)
        program.steps = self.effort.taken(program.steps)
        return program

    def exactly(self) -> Program:
        """In FP64, from parameters and inputs as the storage dtype rounds them."""
        program = self.program(self.dtype)
        if self.workload.given and room.layered(program, self.mode) and self.technique.oracle == "float64":
            return room.by_layer(program)
        program = program.widened()
        if self.technique.oracle != "float64":
            # Static quantization calibrates on random inputs, whatever it is then asked.
            plain = replace(self, draw=self.draw.plain).program(self.dtype).widened() if self.draw.probe else program
            program.module = self.technique.emulate(program.module, plain.inputs)
            if program.optimizer is not None:
                program.optimizer = self.technique.emulate_optimizer(program.optimizer)
        return program

    def eager(self, dtype: str) -> Result:
        """Eager on the CPU, wholly in a dtype."""
        return self.program(dtype).run(self.mode)

    def repeated(self, dtype: str) -> Result:
        """`eager`, run twice: what is random is random there too, at a third of the oracle's time.

        Raises:
            OracleError: The bits differ.
        """
        plain = _Oracle(self.program(dtype), self.mode, self.effort)
        result = plain.run()
        _check_repeatable(plain, result)
        return result

    def eager_wholly(self, precision: str) -> Result | None:
        """Eager wholly in the arithmetic precision, where torch has it as a dtype and the workload runs in it.

        Not for training: parameters kept in half precision lose updates that autocast's FP32 parameters do not.
        """
        if getattr(torch, precision, None) is None or self.mode is Mode.TRAIN:
            return None
        try:
            return self.eager(precision)
        except (NotImplementedError, RuntimeError) as error:
            if not _NO_KERNEL.search(str(error)):
                raise OracleError(
                    f"{self}: eager {precision} on the CPU raised {type(error).__name__}: {error}"
                ) from error
            return None  # samples alone


class _Oracle:
    """An FP64 program that is run several times from the same state, exactly and with rounding errors."""

    def __init__(self, program: Program, mode: Mode, effort: Effort) -> None:
        self._program = program
        self._mode = mode
        self._effort = effort
        self._state = {name: _narrowest(value) for name, value in program.module.state_dict().items()}

    def run(self) -> Result:
        """Run once from the initial state; the result shares no memory with it."""
        result = self._ran()
        return {path: result.pop(path).clone() for path in list(result)}  # one by one: never twice the whole result

    def again(self) -> Result:
        """The same; the result may be the parameters themselves, and is good until the next run."""
        return self._ran()

    def _ran(self, update: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> Result:
        """Run from the initial state, optimizer steps in a context of their own; what the run alone needs is given back."""
        module, effort = self._program.module, self._effort

        def tidied() -> AbstractContextManager[Any]:
            effort.tidy()  # what the backward pass has freed, before the optimizer makes its states
            return update()

        self._program.update = tidied
        module.load_state_dict(self._state)
        result = self._program.run(self._mode)
        if self._mode is Mode.TRAIN:
            module.zero_grad(set_to_none=True)
        return result

    def without_gradient(self, truth: Result) -> frozenset[str]:
        """Parameters and inputs that require a gradient and have none."""
        asked = {name for name, parameter in self._program.module.named_parameters() if parameter.requires_grad}
        asked |= {f"input[{index}]" for index, value in enumerate(self._program.inputs) if is_float(value)}
        return frozenset(name for name in asked if f"grad:{name}" not in truth)

    def outputs(self) -> list[tuple[str, list[Tensor]]]:
        """Run once more: name and outputs of each call of a module, in the order in which the calls end."""
        found: list[tuple[str, list[Tensor]]] = []
        handles = [
            part.register_forward_hook(
                lambda _, __, out, name=name: found.append(
                    (name, [tensor.detach().clone() for tensor in _tensors(out)])
                )
            )
            for name, part in self._program.module.named_modules()
        ]
        try:
            self.run()
        finally:
            for handle in handles:
                handle.remove()
        return found

    def sample(self, seed: int, precision: str, dtype: str) -> Result:
        """With random rounding errors of the arithmetic precision; `dtype` is the storage's. As good for as long as `again` is."""
        generator = torch.Generator().manual_seed(seed)
        for part in (*self._program.module.modules(), self._program.optimizer):
            if hasattr(part, "flips"):
                setattr(part, "flips", generator)  # noqa: B010 - nn.Module types its attributes as tensors and modules
        rounding = Rounding(precision, dtype, generator)
        with rounding:
            return self._ran(lambda: rounding.at(dtype))

    def nearest(self, dtype: str) -> Result:
        """With every operator's result rounded to the nearest number of a dtype. As good for as long as `again` is."""
        with Nearest(getattr(torch, dtype)):
            return self._ran()


def _narrowest(value: Tensor) -> Tensor:
    """A copy in FP32 where that holds the same numbers, as it does those that were widened; NaN is not the same as itself."""
    if value.dtype == torch.float64:
        narrow = value.float()
        if torch.equal(narrow.double(), value):
            return narrow
    return value.clone()


class _Taken:
    """What rounding samples show. Each is read as soon as it is made, and dropped: whole results take the model's memory each."""

    def __init__(self, truth: Result, sticks: Mapping[str, Yardstick]) -> None:
        self._truth = truth
        self._sticks = sticks
        self.readings: dict[str, list[Reading]] = {path: [] for path in sticks}
        self.unlike = ""
        """How the first sample differs that is not of the truth's structure."""

    def read(self, sample: Result, *, optional: bool = False) -> None:
        """Add a sample; an `optional` one that is not like the truth is left out."""
        differing = _unlike(self._truth, sample)
        if differing:
            self.unlike = self.unlike or ("" if optional else differing)
            return
        for path, stick in self._sticks.items():
            self.readings[path].append(stick.read(sample[path]))


def _check_alike(source: _Source, unlike: Mapping[str, str]) -> None:
    for who, difference in unlike.items():
        if difference:
            raise OracleError(f"{source}: the FP64 oracle and {who} disagree: {difference}")


def _layouts(eager: Result) -> dict[str, Layout]:
    return {path: Layout(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride()) for path, t in eager.items()}


def _check_truth(source: _Source, oracle: _Oracle, truth: Result) -> None:
    if not truth or not sum(tensor.numel() for tensor in truth.values()):
        raise OracleError(f"{source}: the oracle produced no elements to compare; its outputs: {sorted(truth)}")
    idle = source.workload.idle
    # In somebody's own model, what gets no gradient is as the owner made it.
    if source.mode is Mode.BACKWARD and not source.workload.given and (lost := oracle.without_gradient(truth) - idle):
        raise OracleError(
            f"{source}: the oracle has no gradient for {', '.join(sorted(lost))}, which require one: name them in `Workload.idle` "
            "if nothing depends on them, else mend the workload"
        )
    overflown = [path for path, tensor in truth.items() if bool(tensor.isnan().any())]
    if overflown and not source.draw.special:
        raise OracleError(
            f"{source}: the FP64 oracle is NaN at {', '.join(overflown)}, with which nothing can be compared: give the model "
            "parameters and inputs for which it is finite"
        )


def _check_repeatable(oracle: _Oracle, truth: Result) -> None:
    """Run the oracle again: bits that differ come from random numbers, whose errors would make every budget a wide one.

    Raises:
        OracleError: They differ; the message names the module.
    """
    again = oracle.again()
    differing = [path for path in truth if path not in again or not _same_bits(truth[path], again[path])]
    if not differing:
        return
    for (name, one), (_, other) in zip(oracle.outputs(), oracle.outputs(), strict=False):
        if len(one) != len(other) or not all(map(_same_bits, one, other)):
            where = f"the output of the module {name!r}" if name else "what the module itself computes"
            break
    else:
        where = "the loss or the backward pass"
    raise OracleError(
        f"two runs from the same state differ in {differing[0]}: {where} is random. Set its rate of dropout to 0 in the workload, "
        "or draw its numbers in `make` and pass them as an input"
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=0.25), other.nan_to_num(nan=0.25))


def _tensors(out: Any) -> list[Tensor]:
    try:
        return [tensor for _, tensor in flatten(out)]
    except TypeError:  # of a submodule: only the whole module's outputs must be tensors
        return []


def _budgets(who: str, peers: list[Reading], unit: float) -> dict[str, float]:
    budgets: dict[str, float] = {}
    for view in VIEWS:
        budgets[view] = budget(view, [peer[view] for peer in peers], unit)
        if not 0.0 <= budgets[view] < math.inf:
            raise VacuousError(
                f"{who}: the budget of view {view} is {budgets[view]}; legal are finite numbers from 0. Infinite, anything "
                "would pass: the oracle is 0 where rounding errs. Change the workload so that this tensor is not made of "
                "rounding errors alone"
            )
    return budgets


def _alone(
    source: _Source, readings: Mapping[str, list[Reading]], truth: Result, unit: float, careful: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Budgets from the samples by path, and why a path has none: rounding errors alone decide it.

    The same paths have none in a closer look as in the first one, whose samples it has too.

    Raises:
        VacuousError: That is so for a tensor of a workload that was made for checks, or for every one.
    """
    found, vacuous = dict[str, dict[str, float]](), dict[str, str]()
    usual, many = (source.effort.count(source.draw, look) for look in (0, careful))
    for path, samples in readings.items():
        who = f"{source}: {path}"
        try:
            budgets = _budgets(who, samples, unit)
            if source.technique.oracle == "float64":  # a rounding moves what a scheme quantizes by a whole step
                if careful and source.workload.given:
                    first = _budgets(who, [*samples[:usual], *samples[many:]], unit)
                    _capped(who, first, truth[path], unit, lowered=False)
                budgets = _capped(who, budgets, truth[path], unit, lowered=bool(careful))
            found[path] = budgets
        except VacuousError as error:
            if not source.workload.given:
                raise
            vacuous[path] = str(error)
    if vacuous and not found:
        first_one = next(iter(vacuous.values()))
        raise VacuousError(f"{source}: rounding errors alone decide every tensor; the first one: {first_one}")
    return found, vacuous


def _capped(who: str, budgets: dict[str, float], truth: Tensor, unit: float, *, lowered: bool) -> dict[str, float]:
    """Budgets of one path within their caps: those of more samples are `lowered` to them, others that are beyond are an error."""
    if lowered:
        return {view: min(budget, caps.cap(view, unit, truth.shape)) for view, budget in budgets.items()}
    if vacuous := caps.beyond(budgets, unit, truth.shape):
        raise VacuousError(f"{who}: {vacuous}")
    return budgets


def _with_eager(alone: Mapping[str, float], eager: Mapping[str, float]) -> dict[str, float]:
    """Budgets of one path, eager among the peers in those views in which the samples explain it."""
    return {
        view: max(budget, SLACK * abs(eager.get(view, 0.0))) if abs(eager.get(view, 0.0)) <= budget else budget
        for view, budget in alone.items()
    }


def _trusted(
    who: str, own: Mapping[str, Reading], samples: Mapping[str, list[Reading]], unit: float, *, lenient: bool
) -> float:
    """How many times more eager errs than the samples, over a whole tensor.

    Raises:
        OracleError: More than `TRUST` times; if `lenient`, in half of the tensors: a rounding may have decided something in eager that it did
            in none of a few samples (see `accelcheck.verify.few`), which only some tensors show.
    """
    # Half a unit of the result's own rounding is explained whatever the samples show.
    found = [reading.relative / max(unit, *(s.relative for s in samples[path])) for path, reading in own.items()]
    excess = max(found, default=0.0)
    held = statistics.median(found) if lenient and found else excess
    if not held <= TRUST:
        raise OracleError(
            f"{who} errs {held:.3g} times more than rounding explains (limit {TRUST:g}): the oracle or eager is wrong, "
            "so nothing can be judged by them"
        )
    return excess


def _unlike(truth: Result, other: Result) -> str:
    """The first difference in paths, shapes, integers, or where NaN and infinities stand; empty if there is none."""
    if truth.keys() != other.keys():
        return f"only one has {', '.join(sorted(truth.keys() ^ other.keys()))}"
    for path, tensor in truth.items():
        if tensor.shape != other[path].shape:
            return f"{path} has the shapes {tuple(tensor.shape)} and {tuple(other[path].shape)}"
        if not tensor.is_floating_point():
            if differing := int((tensor != other[path]).sum()):
                return f"{path}: {differing} of {tensor.numel()} integers differ"
            continue
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            if not torch.equal(kind(tensor), kind(other[path])):
                return f"{path}: {kind.__name__} holds for {int(kind(tensor).sum())} and {int(kind(other[path]).sum())} elements"
    return ""


@contextlib.contextmanager
def _blamed(who: str) -> Iterator[None]:
    """Turn any exception into an `OracleError` that names the failing part."""
    try:
        yield
    except Exception as error:
        raise OracleError(f"{who} raised {type(error).__name__}: {error}") from error


def _plain(reference: Reference) -> dict[str, Any]:
    return {
        "truth": reference.truth,
        "layouts": {path: (x.dtype, x.shape, x.stride) for path, x in reference.layouts.items()},
        "budgets": {path: dict(views) for path, views in reference.budgets.items()},
        "leanings": {path: dict(views) for path, views in reference.leanings.items()},
        "unit": reference.unit,
        "spacing": reference.spacing,
        "eager_excess": reference.eager_excess,
        "alone": {path: dict(views) for path, views in reference.alone.items()},
        "eager": {path: dict(views) for path, views in reference.eager.items()},
        "unjudged": dict(reference.unjudged),
        "reduced": reference.reduced,
        "spread": reference.spread,
    }


def _reference(plain: dict[str, Any]) -> Reference:
    return Reference(
        truth=plain["truth"],
        layouts={path: Layout(*values) for path, values in plain["layouts"].items()},
        budgets=plain["budgets"],
        leanings=plain["leanings"],
        unit=plain["unit"],
        spacing=plain["spacing"],
        eager_excess=plain["eager_excess"],
        alone=plain["alone"],
        eager=plain["eager"],
        unjudged=plain["unjudged"],
        reduced=plain["reduced"],
        spread=plain["spread"],
    )
