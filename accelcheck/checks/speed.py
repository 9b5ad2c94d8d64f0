"""The check of speed: judge first, then measure beside FP32 eager in the same process, then judge what was measured."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.checks import numerics
from accelcheck.checks.trial import Finding, State, absent, warm_up, watched
from accelcheck.core.case import TIMED, Measurement, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.measure import roof
from accelcheck.measure.clocks import ClockError, block, positive, settle, undisturbed
from accelcheck.measure.digest import digest
from accelcheck.measure.further import SPEED_UP
from accelcheck.measure.kernels import Launches, launches
from accelcheck.measure.memory import Peak, held, peak
from accelcheck.measure.paired import ERROR, LOOKS, Comparison, compare
from accelcheck.techniques.compilation.compile import graph_breaks, graphs
from accelcheck.techniques.eager import Eager
from accelcheck.verify.judge import Contract, check_metadata, judge
from accelcheck.verify.oracle import FIRST
from accelcheck.workloads.base import flatten, stored
from accelcheck.workloads.probes import Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelcheck.checks.trial import Trial
    from accelcheck.core.case import Evidence
    from accelcheck.devices.telemetry import Telemetry
    from accelcheck.workloads.base import Result

ROTATED = 4
"""Sets of inputs that calls go through: no call finds its own in a cache, and no cached result serves it."""
PROCESS_SECONDS = 0.3
"""Seconds that one process of several measures a case: processes differ by more than such a median errs."""
PROCESS_ERROR = 0.0625
"""As `paired.ERROR`, of one process of several: four pairs, however slow: min to max, which holds the median in 87.5 of 100 runs."""
TRIES = 16
"""Most blocks that are added where none of the timed ones ended with the first inputs, as one of four does: all miss in 1 of 100 runs without any."""
SLOW = 0.1
"""Seconds of a call from which on the comparison in the technique's own precision, which gates nothing, has the pairs of one
process of several: the nine of `paired.ERROR` take tens of seconds where calls are this slow, as float16 is on CPUs that
convert each of its operations to FP32 and back (17 to 55 times as long as FP32 in baselines/cpu/level2-speed.jsonl)."""
POWERED = 0.5
"""Seconds that energy is taken over: counters move every 0.1 s or so."""
"""The measurement that baselines hold: time of FP32 eager as a multiple of the technique's."""

WHILE = "while timed"
"""The draw of faults of a timed call."""
AFTER = "after timing"
"""The draw of faults that show in what was timed."""


def verify(trial: Trial) -> Finding:
    """Judge the case as in the mode that it runs; if it is right, measure it, and judge it again."""
    mode = TIMED[trial.case.mode]
    judged = replace(trial, case=replace(trial.case, mode=mode))
    finding = numerics.verify(judged, (FIRST,))
    if finding.wrong or finding.undecided:
        return finding  # a case that fails is not timed
    trial.technique.finish()
    with trial.clock("measure"), trial.device.strict_float32():
        return _Measuring(judged).finding(finding)


def ratio(
    trial: Trial,
    looks: Sequence[float] = LOOKS,
    now: Callable[[], float] = time.perf_counter,
    error: float = ERROR,
) -> Comparison:
    """The candidate's time as a part of FP32 eager's, in this process, after so many seconds of a clock; nothing is judged.

    Raises:
        ClockError: There is no time.
    """
    judged = replace(trial, case=replace(trial.case, mode=TIMED[trial.case.mode]))
    with trial.clock("measure"), trial.device.strict_float32():
        return _Measuring(judged).compared(looks, now, error)


class Contender:
    """A program that does the work of a mode once a call, each time with other inputs.

    Attributes:
        program: What is run.
        state: Its parameters and buffers as they were before it ran.
        call: One forward pass or training step.
        preparation: Seconds that the technique took to prepare.
        timed: Runs a block of warm calls, and gives the seconds of one; None until it is first compared.
    """

    timed: Callable[[], float] | None = None
    kept: Result | None = None
    """Result of a timed call with the first inputs, on the device: drawn at random once it was timed; None until then, and of trainings."""

    def __init__(self, trial: Trial) -> None:
        """Prepare; nothing is run but what the technique runs itself."""
        mode = trial.case.mode
        self.program = trial.place(_problem(trial, 0), trial.case.seed)
        self.state = State(self.program)
        trial.device.synchronize()
        start = time.perf_counter()
        trial.prepare(self.program)
        trial.device.synchronize()
        self.preparation = time.perf_counter() - start
        self.sets = [(self.program.inputs, self.program.target)]
        for number in range(1, ROTATED):
            other = _problem(trial, number)
            inputs = tuple(
                _like(own, trial.placed(new)) for own, new in zip(self.program.inputs, other.inputs, strict=True)
            )
            self.sets.append((inputs, trial.placed(other.target)))
        self._turns = itertools.cycle(range(ROTATED))
        self._turn, self._latest, self._blocks = 0, None, 0
        self.program.synchronize = lambda: None  # the clock waits for the device, once a block
        work: Callable[[], Any] = self.program.repeated(mode)

        def call() -> object:
            self._turn = turn = next(self._turns)
            self.program.inputs, self.program.target = self.sets[turn]
            self._latest = None  # its memory is free for this call, as for users who do not keep it
            self._latest = out = work()
            return out

        self.call = call

    def drawn(self, timed: Callable[[], float]) -> float:
        """The seconds of a block of calls, whose last one may be any: where it had the first inputs, its result may be kept."""
        for _ in range(_CHANCE.randrange(ROTATED)):
            next(self._turns)
        seconds = timed()
        if self._turn == 0 and self._latest is not None:
            self._blocks += 1
            if _CHANCE.random() * self._blocks < 1.0:  # each of the blocks so far is as likely as the others
                self.kept = {path: stored(tensor).clone() for path, tensor in self._result()}
        self._latest = None
        return seconds

    def _result(self) -> Iterable[tuple[str, Tensor]]:
        latest: Any = self._latest
        return latest.items() if self.program.elsewhere is not None else flatten(latest)

    def rewind(self) -> None:
        """Restore the first inputs and the initial parameters."""
        self.state.restore()
        self.program.inputs, self.program.target = self.sets[0]


class _Measuring:
    """The measurements of one case that is right."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.found: list[Measurement] = []
        self.blocks: tuple[float, ...] = ()
        self._work = self._moved = 0.0

    def finding(self, judged: Finding) -> Finding:
        """All measurements, and the faults that show after them."""
        trial = self.trial
        candidate = self._first_calls()
        eager = self._eager("float32")
        before = trial.device.telemetry()
        latency = math.inf
        with undisturbed(), self._clocked("latency", "s"):
            latency = self._times(candidate, eager)
            with self._clocked("energy", "J"):
                self._chip(before, candidate, latency)
            with self._clocked("flops", "part"):
                self._roof(candidate, eager, latency)
            if trial.technique.precision(trial.case.dtype) != "float32":
                with self._clocked("speed-up-same-precision", "x"):
                    self._same_precision(candidate, latency)
        implausible = self._idle(self._sizes(candidate, eager)) or self._impossible(latency)
        faults, evidence = self._judged(candidate)
        work = digest(trial.case.id, _problem(trial, 0))
        return replace(
            judged,
            evidence=[*judged.evidence, *absent(judged.evidence, evidence, AFTER)],
            faults=[*judged.faults, *self._unfused(), *faults],
            measurements=self.found,
            digest=work,
            times=self.blocks,
            implausible=implausible,
        )

    @contextlib.contextmanager
    def _clocked(self, name: str, unit: str) -> Iterator[None]:
        """Record a measurement without a value, with the reason, when its clock fails."""
        try:
            yield
        except ClockError as error:
            self._add(name, None, unit, str(error))

    def compared(self, looks: Sequence[float], now: Callable[[], float], error: float) -> Comparison:
        """The candidate beside FP32 eager."""
        candidate = Contender(self.trial)
        warm_up(self.trial, candidate.program)
        eager = self._eager("float32")
        with undisturbed():
            return self._paired(eager, candidate, looks, now, error)

    def _first_calls(self) -> Contender:
        """Prepare and call once, with the compilers' caches empty and then full: two times in s, and the graphs made."""
        trial = self.trial
        with _fresh_caches():
            self._first_call("first-call-cold")
            trial.technique.finish()
            candidate = self._first_call("first-call-warm")
            warm_up(trial, candidate.program)
        candidate.rewind()
        made = graphs()
        if made:
            self._add("graphs", made, "1")
            self._add("graph-breaks", graph_breaks(), "1")
        return candidate

    def _first_call(self, name: str) -> Contender:
        device, contender = self.trial.device, Contender(self.trial)
        spent = device.elapsed(contender.call, 1)
        with self._clocked(name, "s"):
            self._add(name, contender.preparation + positive(spent, device, 1), "s")
        return contender

    def _eager(self, dtype: str) -> Contender:
        case = replace(self.trial.case, technique=Eager.name, dtype=dtype)
        return Contender(replace(self.trial, technique=Eager(), case=case))

    def _paired(
        self,
        base: Contender,
        candidate: Contender,
        looks: Sequence[float] = LOOKS,
        now: Callable[[], float] = time.perf_counter,
        error: float = ERROR,
    ) -> Comparison:
        first, second = (self._settled(side) for side in (base, candidate))
        return compare(first, second, looks=looks, now=now, error=error)

    def _settled(self, side: Contender) -> Callable[[], float]:
        """Blocks of a contender's calls, warmed up: once, however often it is compared."""
        if side.timed is None:
            timed = block(self.trial.device, side.call)
            side.timed = partial(side.drawn, timed) if self.trial.case.mode is Mode.FORWARD else timed
            settle(side.timed)
        return side.timed

    def _times(self, candidate: Contender, eager: Contender) -> float:
        """The candidate's median, in seconds, once its figures are there."""
        comparison = self._paired(eager, candidate)
        for _ in range(TRIES):
            if candidate.kept is None and candidate.timed is not None and self.trial.case.mode is Mode.FORWARD:
                candidate.timed()
        self.blocks = comparison.candidate
        quarters = statistics.quantiles(comparison.candidate, n=20, method="inclusive")
        latency = statistics.median(comparison.candidate)
        self._add("latency", latency, "s", low=quarters[4], high=quarters[14], reason="median and quartiles")
        self._add("latency-p95", quarters[18], "s")
        self._add("latency-fp32-eager", statistics.median(comparison.base), "s")
        if comparison.waited is not None:
            self._add("waited", comparison.waited, "part", "of the time, for a core: other work, or threads of its own")
        self._speed_up(SPEED_UP, comparison)
        products = self.trial.device.float32_products()
        if not products.exact:  # what it is faster than is then no FP32
            self._add("fp32-eager-error", products.error, "1", f"FP32 eager here is none: {products.reading}")
        items = _items(candidate.program.inputs)
        if items:
            self._add("throughput", items / latency, "samples/s")
        return latency

    def _chip(self, before: Telemetry, candidate: Contender, latency: float) -> None:
        """The chip's clock, temperature and throttling while it was timed, and the energy of a call."""
        device = self.trial.device
        after = device.telemetry()
        if after.throttled != before.throttled or (after.throttled and not device.has("host")):
            self._add("throttled", 1, "1", after.throttled or before.throttled)
        for name, value, unit in (("clock", after.clock, "MHz"), ("temperature", after.temperature, "degC")):
            if value is not None:
                self._add(name, value, unit)
        if after.energy is None:
            return
        timed, start = block(device, candidate.call), time.perf_counter()
        begun = device.telemetry().energy
        while time.perf_counter() - start < POWERED:
            timed()
        ended, seconds = device.telemetry().energy, time.perf_counter() - start
        if begun is not None and ended is not None and ended > begun:
            self._add("energy", (ended - begun) / seconds * latency, "J", "mean power of the chip, times the median")

    def _speed_up(self, name: str, comparison: Comparison) -> None:
        reason = f"{comparison.answer}, {comparison.pairs} pairs"
        self._add(name, 1 / comparison.ratio, "x", reason, low=1 / comparison.high, high=1 / comparison.low)

    def _same_precision(self, candidate: Contender, latency: float) -> None:
        """Beside eager with everything in the precision that the technique computes in, where eager has it."""
        name = "speed-up-same-precision"
        precision = self.trial.technique.precision(self.trial.case.dtype)
        if precision not in {"bfloat16", "float16"}:
            return self._add(name, None, "x", f"eager does not compute in {precision}")
        if precision not in self.trial.workload.dtypes:
            return self._add(name, None, "x", f"the workload is none in {precision}")
        if latency < SLOW:
            return self._speed_up(name, self._paired(self._eager(precision), candidate))
        # One look, so that the interval is what four pairs give.
        comparison = self._paired(self._eager(precision), candidate, LOOKS[-1:], error=PROCESS_ERROR)
        return self._speed_up(name, comparison)

    def _roof(self, candidate: Contender, eager: Contender, latency: float) -> None:
        device = self.trial.device
        self._work = work = float(roof.flops(eager.call))
        precision = self.trial.technique.precision(self.trial.case.dtype)
        known = precision if precision in {"bfloat16", "float16"} else "float32"
        products = roof.matmul_peak(device, known)
        reason = f"of the {known} matmul peak measured here {products.remark}"
        self._add("flops", work / latency / products.value, "part", reason)
        self._moved = moved = float(held([candidate.program.inputs, *_parameters(candidate)]))
        copies = roof.bandwidth(device)
        reason = f"of the copy bandwidth measured here {copies.remark}, at least"
        self._add("bytes", moved / latency / copies.value, "part", reason)

    def _sizes(self, candidate: Contender, eager: Contender) -> dict[str, Launches]:
        """Memory and launches of both; returns the launches, eager's under ``-fp32-eager``."""
        device = self.trial.device
        started: dict[str, Launches] = {}
        for suffix, side in (("", candidate), ("-fp32-eager", eager)):
            side.program.module.zero_grad(set_to_none=True)
            if side is candidate and self.trial.technique.own_memory:
                most = Peak(None, "its runtime allocates memory that torch does not see")
            else:
                most = peak(device, side.call)
            self._add(f"peak-memory{suffix}", most.bytes, "B", most.reason)
            self._add(f"parameters{suffix}", held(_parameters(side)), "B")
            started[suffix] = launches(device, side.call, None if suffix else self.trial.trace)
        for suffix, launched in started.items():
            self._add(f"launches{suffix}", launched.count, "1", launched.instead_of(started["-fp32-eager"]))
            if launched.seconds is not None:
                self._add(f"kernel-time{suffix}", launched.seconds, "s")
        return started

    def _idle(self, started: Mapping[str, Launches]) -> str:
        """Reason why a call did no work, where no profiler sees any and eager's shows; empty where it did some."""
        own, plain = started[""], started["-fp32-eager"]
        if not own.nothing or not plain.count:
            return ""
        return f"a call launches nothing, where eager has {plain.count} launches"

    def _impossible(self, latency: float) -> str:
        """Reason why a call cannot be as fast as it was timed; empty where it can, or where no clock says."""
        if not math.isfinite(latency):
            return ""
        with contextlib.suppress(ClockError):
            return roof.excluded(self.trial.device, self._work, self._moved, latency)
        return ""

    def _unfused(self) -> list[Fault]:
        """A fault where a technique that promises fusion launches as many kernels as eager. A single launch cannot become fewer."""
        values = {measurement.name: measurement.value for measurement in self.found}
        own, plain = values["launches"], values["launches-fp32-eager"]
        if not self.trial.technique.fuses or own is None or plain is None or plain < 2 or own < plain:
            return []
        expected = f"fewer than {plain:.0f}, as many as eager has"
        return [Fault(FaultKind.RULE, "launches", "not fused", expected=expected, got=f"{own:.0f}")]

    def _judged(self, candidate: Contender) -> tuple[list[Fault], list[Evidence]]:
        """What was timed is what was judged: the first inputs, and the parameters as they were, must give that again, engaged."""
        trial, timed = self.trial, self._faults(candidate.kept) if candidate.kept is not None else ()
        faults = [replace(fault, draw=WHILE) for fault in (*timed, *self._untrained(candidate))]
        candidate.rewind()
        candidate.program.synchronize = trial.device.synchronize
        trial.device.seed(trial.case.seed)
        raw, evidence = watched(trial, candidate.program, trial.case.mode)
        return [*faults, *(replace(fault, draw=AFTER) for fault in self._faults(raw))], evidence

    def _faults(self, result: Result) -> Sequence[Fault]:
        """Faults of a result of what was timed."""
        trial, reference = self.trial, self.trial.reference()
        precision = trial.technique.precision(trial.case.dtype)
        contract = Contract(trial.device.type, strides=False, dtypes=frozenset({precision} - {trial.case.dtype}))
        if wrong := [*check_metadata(result, reference, contract)]:
            return wrong
        return judge({path: tensor.cpu() for path, tensor in result.items()}, reference).faults

    def _untrained(self, candidate: Contender) -> Iterator[Fault]:
        """A fault for each parameter that timed steps left alone, where training moves it."""
        trial, program = self.trial, candidate.program
        if trial.case.mode is not Mode.TRAIN or program.elsewhere is not None:
            return
        truth = trial.reference().truth
        moved = {fault.path for fault in candidate.state.mutations()}
        for name, start in _problem(trial, 0).module.named_parameters():
            path = f"parameter:{name}"
            trains = path in truth and not torch.equal(truth[path], start.detach().double())
            if trains and path not in moved:
                yield Fault(
                    FaultKind.RULE, path, "not trained", expected="moved by the timed steps", got="as before them"
                )

    def _add(
        self,
        name: str,
        value: float | None,
        unit: str,
        reason: str = "",
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        self.found.append(Measurement(name, None if value is None else float(value), unit, low, high, reason))


_CHANCE = random.SystemRandom()
"""A source of chance that no technique can know."""


def _problem(trial: Trial, number: int) -> Any:
    return Draw(number).problem(trial.workload, trial.case.seed, trial.case.dtype)


def _like(own: Any, new: Any) -> Any:
    """New values in the strides that the technique gave its own."""
    return own.detach().clone().copy_(new) if isinstance(own, Tensor) else new


def _items(inputs: tuple[Any, ...]) -> int:
    first = next((value for value in inputs if isinstance(value, Tensor) and value.dim()), None)
    return 0 if first is None else len(first)


def _parameters(contender: Contender) -> Iterator[Any]:
    """The state of the module that is called: tensors, and packed tensors in tuples."""
    called = contender.program.call
    module = called if isinstance(called, torch.nn.Module) else contender.program.module
    yield from module.state_dict().values()


@contextlib.contextmanager
def _fresh_caches() -> Iterator[None]:
    """Inductor's cache in a folder of its own, and empty."""
    from accelcheck.devices.torch_names import fresh_cache

    fresh: Callable[[], contextlib.AbstractContextManager[Any]] = fresh_cache
    with fresh():
        yield
