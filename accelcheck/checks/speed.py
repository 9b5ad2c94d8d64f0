"""Check of speed: judges, measures beside FP32 eager in the same process, and judges the timed program again."""

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.checks import numerics
from accelcheck.checks.trial import Finding, State, Trial, absent, warm_up, watched
from accelcheck.core.case import TIMED, Evidence, Measurement, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.devices.telemetry import Telemetry
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
from accelcheck.workloads.base import Result, flatten, stored
from accelcheck.workloads.probes import Draw

ROTATED = 4
"""Number of input sets that calls rotate through, so that neither cached inputs nor cached results serve them."""
PROCESS_SECONDS = 0.3
"""Seconds that one of several processes measures a case: processes differ more than such a median errs."""
PROCESS_ERROR = 0.0625
"""Counterpart of `paired.ERROR` for one of several processes: min to max of four pairs, which holds the median in
87.5 of 100 runs."""
TRIES = 16
"""Most blocks added if no timed one ended with the first inputs, as one of `ROTATED` does: 1 run in 100 still has
none."""
SLOW = 0.1
"""Seconds of a call from which on the comparison in the technique's own precision, which gates nothing, uses
`PROCESS_ERROR`: the nine pairs of `paired.ERROR` would take tens of seconds, as with float16 on CPUs that convert each
operation to FP32 and back (17 to 55 times as long as FP32 in baselines/cpu/level2-speed.jsonl)."""
POWERED = 0.5
"""Seconds that energy is taken over: counters move every 0.1 s or so."""
WHILE = "while timed"
"""Draw name of faults of a timed call."""
AFTER = "after timing"
"""Draw name of faults of the timed program when it is judged again."""


def verify(trial: Trial) -> Finding:
    """Judges the case in the mode that it times; if it is right, measures it and judges it again."""
    mode = TIMED[trial.case.mode]
    judged = replace(trial, case=replace(trial.case, mode=mode))
    finding = numerics.verify(judged, (FIRST,))
    if finding.wrong or finding.undecided:
        return finding  # a case that fails is not timed
    trial.technique.finish()
    with trial.clock("measure"), trial.device.strict_float32():
        return _Measuring(judged).finding(finding)


def ratio(
    trial: Trial, looks: Sequence[float] = LOOKS, now: Callable[[], float] = time.perf_counter, error: float = ERROR
) -> Comparison:
    """Measures the candidate's time as a part of FP32 eager's in this process, without judging it.

    Raises:
        ClockError: The clock measured no time.
    """
    judged = replace(trial, case=replace(trial.case, mode=TIMED[trial.case.mode]))
    with trial.clock("measure"), trial.device.strict_float32():
        return _Measuring(judged).compared(looks, now, error)


class Contender:
    """Program that does the work of a mode once a call (`call`), each time with other inputs.

    Attributes:
        state: Its parameters and buffers as they were before it ran.
        preparation: Seconds that the technique took to prepare.
        timed: Function that runs a block of warm calls and returns the seconds of one; None before a comparison.
    """

    timed: Callable[[], float] | None = None
    kept: Result | None = None
    """Result of a randomly drawn timed call with the first inputs, on the device; None before, and for trainings."""

    def __init__(self, trial: Trial) -> None:
        """Prepares the technique without calling the program."""
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
            inputs = zip(self.program.inputs, map(trial.placed, other.inputs), strict=True)
            self.sets.append((tuple(_like(own, new) for own, new in inputs), trial.placed(other.target)))
        self._turns = itertools.cycle(range(ROTATED))
        self._turn, self._latest, self._blocks = 0, None, 0
        self.program.synchronize = lambda: None  # the clock waits for the device, once a block
        work: Callable[[], Any] = self.program.repeated(mode)

        def call() -> object:
            self._turn = turn = next(self._turns)
            self.program.inputs, self.program.target = self.sets[turn]
            self._latest = None  # frees memory, as for users who keep no result
            self._latest = out = work()
            return out

        self.call = call

    def drawn(self, timed: Callable[[], float]) -> float:
        """Times a block of calls from a random set of inputs on; may keep a last result of the first inputs."""
        for _ in range(_CHANCE.randrange(ROTATED)):
            next(self._turns)
        seconds = timed()
        if self._turn == 0 and self._latest is not None:
            self._blocks += 1
            if _CHANCE.random() * self._blocks < 1.0:  # all blocks so far are equally likely
                self.kept = {path: stored(tensor).clone() for path, tensor in self._result()}
        self._latest = None
        return seconds

    def _result(self) -> Iterable[tuple[str, Tensor]]:
        latest: Any = self._latest
        return latest.items() if self.program.elsewhere is not None else flatten(latest)

    def rewind(self) -> None:
        """Restores the first inputs and the initial parameters."""
        self.state.restore()
        self.program.inputs, self.program.target = self.sets[0]


class _Measuring:
    """Measures one case that is right."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.found: list[Measurement] = []
        self.blocks: tuple[float, ...] = ()
        self._work = self._moved = 0.0

    def finding(self, judged: Finding) -> Finding:
        """Measures, judges the timed program again, and adds both to the finding."""
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
        """Records a measurement without a value, with the reason, if its clock fails."""
        try:
            yield
        except ClockError as error:
            self._add(name, None, unit, str(error))

    def compared(self, looks: Sequence[float], now: Callable[[], float], error: float) -> Comparison:
        """Compares the candidate with FP32 eager."""
        candidate = Contender(self.trial)
        warm_up(self.trial, candidate.program)
        eager = self._eager("float32")
        with undisturbed():
            return self._paired(eager, candidate, looks, now, error)

    def _first_calls(self) -> Contender:
        """Times preparation and first call with empty and then full compiler caches; counts the graphs."""
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
        """Returns the timed block of a contender, warmed up once however often it is compared."""
        if side.timed is None:
            timed = block(self.trial.device, side.call)
            side.timed = partial(side.drawn, timed) if self.trial.case.mode is Mode.FORWARD else timed
            settle(side.timed)
        return side.timed

    def _times(self, candidate: Contender, eager: Contender) -> float:
        """Adds the figures of the comparison; returns the candidate's median in seconds."""
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
        if not products.exact:  # the base of the speed-up is then no FP32
            self._add("fp32-eager-error", products.error, "1", f"FP32 eager here is none: {products.reading}")
        first = next((value for value in candidate.program.inputs if isinstance(value, Tensor) and value.dim()), None)
        if first is not None and len(first):
            tokens = "decoder" in self.trial.workload.traits
            count, unit = (first.numel(), "tokens/s") if tokens else (len(first), "samples/s")
            self._add("throughput", count / latency, unit)
        return latency

    def _chip(self, before: Telemetry, candidate: Contender, latency: float) -> None:
        """Adds the chip's clock, temperature and throttling after timing, and the energy of a call."""
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
        """Compares with eager in the precision that the technique computes in, where eager has it."""
        name = "speed-up-same-precision"
        precision = self.trial.technique.precision(self.trial.case.dtype)
        if precision not in {"bfloat16", "float16"}:
            return self._add(name, None, "x", f"eager does not compute in {precision}")
        if precision not in self.trial.workload.dtypes:
            return self._add(name, None, "x", f"the workload is none in {precision}")
        if latency < SLOW:
            return self._speed_up(name, self._paired(self._eager(precision), candidate))
        # One look, so that the interval is that of four pairs.
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
        """Adds memory and launches of both; returns the launches, eager's under ``-fp32-eager``."""
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
        """Returns why a call did no work: it launched nothing where eager launches kernels; empty if it did work."""
        own, plain = started[""], started["-fp32-eager"]
        if not own.nothing or not plain.count:
            return ""
        return f"a call launches nothing, where eager has {plain.count} launches"

    def _impossible(self, latency: float) -> str:
        """Returns why a call cannot be as fast as it was timed; empty if it can, or no clock tells."""
        with contextlib.suppress(ClockError):
            return roof.excluded(self.trial.device, self._work, self._moved, latency) if math.isfinite(latency) else ""
        return ""

    def _unfused(self) -> list[Fault]:
        """Makes a fault if a technique that promises fusion launches as many kernels as eager, more than one."""
        values = {measurement.name: measurement.value for measurement in self.found}
        own, plain = values["launches"], values["launches-fp32-eager"]
        if not self.trial.technique.fuses or own is None or plain is None or plain < 2 or own < plain:
            return []
        expected = f"fewer than {plain:.0f}, as many as eager has"
        return [Fault(FaultKind.RULE, "launches", "not fused", expected=expected, got=f"{own:.0f}")]

    def _judged(self, candidate: Contender) -> tuple[list[Fault], list[Evidence]]:
        """Judges the timed program again with the first inputs and parameters; returns faults and evidence."""
        trial, timed = self.trial, self._faults(candidate.kept) if candidate.kept is not None else ()
        faults = [replace(fault, draw=WHILE) for fault in (*timed, *self._untrained(candidate))]
        candidate.rewind()
        candidate.program.synchronize = trial.device.synchronize
        trial.device.seed(trial.case.seed)
        raw, evidence = watched(trial, candidate.program, trial.case.mode)
        return [*faults, *(replace(fault, draw=AFTER) for fault in self._faults(raw))], evidence

    def _faults(self, result: Result) -> Sequence[Fault]:
        """Returns the faults of a result of the timed program."""
        trial, reference = self.trial, self.trial.reference()
        precision = trial.technique.precision(trial.case.dtype)
        contract = Contract(trial.device.type, strides=False, dtypes=frozenset({precision} - {trial.case.dtype}))
        if wrong := [*check_metadata(result, reference, contract)]:
            return wrong
        return judge({path: tensor.cpu() for path, tensor in result.items()}, reference).faults

    def _untrained(self, candidate: Contender) -> Iterator[Fault]:
        """Yields a fault for each parameter that training moves and the timed steps did not."""
        trial, program = self.trial, candidate.program
        if trial.case.mode is not Mode.TRAIN or program.elsewhere is not None:
            return
        truth = trial.reference().truth
        moved = {fault.path for fault in candidate.state.mutations()}
        for name, start in _problem(trial, 0).module.named_parameters():
            path = f"parameter:{name}"
            trains = path in truth and not torch.equal(truth[path], start.detach().double())
            if trains and path not in moved:
                yield Fault(FaultKind.RULE, path, "not trained", "", "moved by the timed steps", "as before them")

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
"""Random source that no technique can predict."""


def _problem(trial: Trial, number: int) -> Any:
    return Draw(number).problem(trial.workload, trial.case.seed, trial.case.dtype)


def _like(own: Any, new: Any) -> Any:
    """Copies new values into the strides that the technique gave its own."""
    return own.detach().clone().copy_(new) if isinstance(own, Tensor) else new


def _parameters(contender: Contender) -> Iterator[Any]:
    """Yields the state of the called module: tensors, and packed tensors in tuples."""
    called = contender.program.call
    module = called if isinstance(called, torch.nn.Module) else contender.program.module
    yield from module.state_dict().values()


def _fresh_caches() -> contextlib.AbstractContextManager[Any]:
    """Provides an empty folder for Inductor's cache."""
    from accelcheck.devices.torch_names import fresh_cache

    fresh: Callable[[], contextlib.AbstractContextManager[Any]] = fresh_cache
    return fresh()
