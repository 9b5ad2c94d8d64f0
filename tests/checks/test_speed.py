from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import bench
from technique_harness import named
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.checks import speed
from accelcheck.checks.speed import ROTATED, Contender
from accelcheck.checks.trial import Trial
from accelcheck.core.case import Case, Evidence, Measurement, Mode, Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import ErrorCode
from accelcheck.devices.base import Device
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.telemetry import Telemetry
from accelcheck.devices.torch_names import get_current_dispatch_mode_stack
from accelcheck.measure import paired, roof
from accelcheck.measure.clocks import ClockError, block
from accelcheck.measure.memory import Peak
from accelcheck.techniques.base import Technique
from accelcheck.techniques.eager import TECHNIQUES as EAGER
from accelcheck.techniques.observe import Log
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.speed import WORKLOADS


def linear(generator: torch.Generator, extent: int) -> Problem:
    return Problem(
        nn.Linear(8, 4),
        (torch.randn(6, 8, generator=generator),),
        target=torch.randn(6, 4, generator=generator),
        loss=functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        steps=2,
    )


WORKLOAD = Workload("by-hand", "A linear layer.", linear, 1, frozenset({Mode.SPEED, Mode.TRAIN_SPEED}))
CASE = Case("eager", "by-hand", "cpu", "float32", Mode.SPEED, 1)


class Acting(Technique):
    """Calls the module, and `act` after it, with the number of the call."""

    name, family, promise, source = "acting", "toy", "None.", "https://example.org/acting"

    def __init__(self, act: Callable[[int, Tensor], Tensor], engaged: bool = True) -> None:
        self.act = act
        self.engaged = engaged
        self.calls = itertools.count()

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.call = lambda *inputs: self.act(next(self.calls), program.module(*inputs))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield Evidence("it acted", "yes", engaged=self.engaged)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A trial of eager, measured for an instant."""
    monkeypatch.setattr(speed, "settle", lambda timed: timed())
    monkeypatch.setattr(speed, "compare", partial(paired.compare, looks=(0.001,)))
    monkeypatch.setattr(speed._Measuring, "_paired", _paired)
    return Trial(CASE, named(EAGER, "eager"), WORKLOAD, Cpu(), Store(tmp_path))


def _paired(self: Any, base: Contender, candidate: Contender, *_: Any, **__: Any) -> paired.Comparison:
    first, second = (block(self.trial.device, side.call) for side in (base, candidate))
    return paired.compare(first, second, looks=(0.001,))


PAIRED = speed._Measuring._paired


@pytest.fixture
def drawing(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A `trial` with blocks of calls of which one is drawn."""
    monkeypatch.setattr(speed._Measuring, "_paired", lambda self, base, c, *_: PAIRED(self, base, c, (0.001,)))
    return trial


def figures(found: Any) -> dict[str, Measurement]:
    return {measurement.name: measurement for measurement in found.measurements}


def test_throughput_of_a_decoder_counts_tokens(trial: Trial) -> None:
    counted = replace(trial, workload=replace(trial.workload, traits=trial.workload.traits | {"decoder"}))
    measured = figures(speed.verify(replace(counted, case=replace(CASE, mode=Mode.SPEED))))
    elements = trial.workload.problem(1).inputs[0].numel()
    assert measured["throughput"].unit == "tokens/s"
    assert measured["throughput"].value == pytest.approx(elements / (measured["latency"].value or 0))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", [Mode.SPEED, Mode.TRAIN_SPEED])
def test_what_is_right_is_measured(trial: Trial, mode: Mode) -> None:
    finding = speed.verify(replace(trial, case=replace(CASE, mode=mode)))
    assert not finding.faults
    assert finding.compared > 0
    assert len(finding.digest) == 8
    measured = figures(finding)
    assert measured["launches"].value == measured["launches-fp32-eager"].value
    assert measured["throughput"].value == pytest.approx(6 / (measured["latency"].value or 0))
    assert measured["latency"].value == pytest.approx(sorted(finding.times)[len(finding.times) // 2], rel=0.5)


def test_what_is_wrong_is_not_timed(trial: Trial) -> None:
    finding = speed.verify(replace(trial, technique=Acting(lambda _, out: out * 1.01)))
    assert finding.faults
    assert not finding.measurements


def test_what_did_not_engage_is_not_timed(trial: Trial) -> None:
    finding = speed.verify(replace(trial, technique=Acting(lambda _, out: out, engaged=False)))
    assert not finding.faults
    assert not finding.measurements


def test_what_goes_wrong_while_it_is_timed_is_a_fault(trial: Trial) -> None:
    late = Acting(lambda call, out: out * 1.01 if call > 20 else out)
    finding = speed.verify(replace(trial, technique=late))
    assert any((fault.path, fault.draw) == ("out", "after timing") for fault in finding.faults)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("late", "view"),
    [(lambda out: out[:1], "shape"), (lambda out: {"other": out}, "missing")],
    ids=["shape", "missing"],
)
def test_wrong_metadata_after_timing_is_a_fault(late: Callable[[Tensor], Any], view: str, trial: Trial) -> None:
    finding = speed.verify(replace(trial, technique=Acting(lambda call, out: late(out) if call > 20 else out)))
    assert ("after timing", FaultKind.METADATA, view) in {(f.draw, f.kind, f.view) for f in finding.faults}


class Lazy(Technique):
    """Eager while judged, and under a dispatch mode; `lazily` replaces the calls of a timed program."""

    name, family, promise, source = "lazy", "toy", "None.", "https://example.org/lazy"

    def __init__(self, lazily: Callable[[Program], None]) -> None:
        self.lazily = lazily
        self.prepared = 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.prepared += 1
        if self.prepared > 1:  # the first program is judged
            self.lazily(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield Evidence("it ran", "yes", engaged=True)


def kept(result: Callable[[Tensor], object]) -> Callable[[Program], None]:
    """Calls that give what a function makes of the first result."""

    def lazily(program: Program) -> None:
        first: list[object] = []

        def call(x: Tensor) -> object:
            if get_current_dispatch_mode_stack():
                return program.module(x)
            if not first:
                first.append(result(program.module(x)))
            return first[0]

        program.call = call

    return lazily


def untrained(program: Program) -> None:
    plain = program._advance
    program.advance = lambda optimizer, step: (
        plain(optimizer, step) if get_current_dispatch_mode_stack() else torch.zeros(())
    )


@pytest.mark.slow
def test_a_timed_call_is_drawn_and_judged(drawing: Trial) -> None:
    finding = speed.verify(replace(drawing, technique=Lazy(kept(lambda out: out + 1.0))))
    assert {fault.draw for fault in finding.faults} == {speed.WHILE}


@pytest.mark.slow
def test_a_result_of_other_shape_while_timed_is_a_fault(drawing: Trial) -> None:
    finding = speed.verify(replace(drawing, technique=Lazy(kept(lambda out: out[:1]))))
    assert {(fault.draw, fault.kind) for fault in finding.faults} == {(speed.WHILE, FaultKind.METADATA)}


@pytest.mark.slow
def test_what_is_right_while_timed_is_right(drawing: Trial) -> None:
    finding = speed.verify(drawing)
    assert (finding.wrong, finding.implausible) == ((), "")


def test_timed_steps_must_move_what_training_moves(trial: Trial) -> None:
    finding = speed.verify(replace(trial, technique=Lazy(untrained), case=replace(CASE, mode=Mode.TRAIN_SPEED)))
    assert {(fault.draw, fault.view) for fault in finding.faults} == {(speed.WHILE, "not trained")}


def test_a_call_that_launches_nothing_is_an_error(trial: Trial) -> None:
    finding = speed.verify(replace(trial, technique=Lazy(kept(lambda out: out))))
    assert finding.implausible == "a call launches nothing, where eager has 1 launches"


@pytest.mark.slow
def test_a_time_that_no_peak_allows_is_an_error(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "matmul_peak", lambda *_: roof.Rate(1.0, "nothing", 0.0))
    finding = speed.verify(trial)
    assert "operations a second" in finding.implausible
    record = bench(trial.store, named(EAGER, "eager"), WORKLOAD, Cpu()).run(CASE)
    assert (record.verdict, record.code) == (Verdict.ERROR, ErrorCode.IMPLAUSIBLE)


def test_bytes_that_no_cache_delivers_are_an_error(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "bandwidth", lambda *_: roof.Rate(1.0, "nothing", 0.0))
    assert "bytes a second" in speed.verify(trial).implausible


@pytest.mark.slow
def test_training_is_judged_afterwards_from_its_own_parameters(trial: Trial) -> None:
    # The judge takes 6 calls; a slow machine times few.
    late = Acting(lambda call, out: out * 1.01 if call > 10 else out)
    for technique, wrong in ((named(EAGER, "eager"), False), (late, True)):
        finding = speed.verify(replace(trial, technique=technique, case=replace(CASE, mode=Mode.TRAIN_SPEED)))
        assert any(fault.draw == "after timing" for fault in finding.faults) == wrong


@pytest.mark.slow
def test_what_promises_to_fuse_must_launch_less(trial: Trial) -> None:
    class Fusing(Acting):
        fuses = True

    none = Fusing(lambda _, out: out)
    # A linear layer is one launch: nothing to fuse.
    assert not speed.verify(replace(trial, technique=none)).faults
    twice = replace(WORKLOAD, name="two-launches", make=lambda g, extent: replace(linear(g, extent), module=_Relu()))
    case = replace(CASE, workload=twice.name)  # references are kept by name
    (fault,) = speed.verify(replace(trial, case=case, technique=none, workload=twice)).faults
    assert str(fault) == "launches: not fused: expected fewer than 2, as many as eager has, got 2"


class _Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layer(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("workload", [w for w in WORKLOADS if "scriptable" in w.traits], ids=lambda w: w.name)
def test_what_is_timed_is_scriptable_as_its_traits_say(workload: Workload) -> None:
    problem = workload.problem(0)
    scripted = torch.jit.script(problem.module.eval())
    torch.testing.assert_close(scripted(*problem.inputs), problem.module(*problem.inputs))


def test_calls_go_through_different_inputs(trial: Trial) -> None:
    seen: list[Tensor] = []
    contender = Contender(replace(trial, case=replace(CASE, mode=Mode.FORWARD)))
    module = contender.program.module
    contender.program.call = lambda x: seen.append(x) or module(x)  # type: ignore[func-returns-value]  # appends first
    for _ in range(2 * ROTATED):
        contender.call()
    assert len({x.data_ptr() for x in seen}) == ROTATED
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen[:ROTATED], 2))
    assert all(a is b for a, b in zip(seen[:ROTATED], seen[ROTATED:], strict=True))


def test_inputs_keep_the_strides_that_the_technique_gave_them(trial: Trial) -> None:
    class Transposed(Acting):
        def prepare(self, program: Program, mode: Mode, device: Device) -> None:
            program.inputs = tuple(x.t().contiguous().t() for x in program.inputs)

    technique = Transposed(lambda _, out: out)
    contender = Contender(replace(trial, technique=technique, case=replace(CASE, mode=Mode.FORWARD)))
    assert {x.stride() for inputs, _ in contender.sets for x in inputs} == {(1, 6)}


def test_training_steps_go_on_from_each_other_and_rewind(trial: Trial) -> None:
    contender = Contender(replace(trial, case=replace(CASE, mode=Mode.TRAIN)))
    weight = contender.program.module.get_parameter("weight")
    start = weight.detach().clone()
    losses = [float(contender.call()) for _ in range(8 * ROTATED)]  # type: ignore[arg-type]  # a loss
    assert losses[-1] < losses[0]
    contender.rewind()
    assert torch.equal(weight, start)


def test_preparing_counts_as_the_first_call(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(0.0, 5.0)
    monkeypatch.setattr("accelcheck.checks.speed.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(Cpu, "elapsed", lambda *_: 2.0)
    monkeypatch.setattr(speed, "compare", _stopped)
    measured = figures(speed.verify(trial))
    assert measured["first-call-cold"].value == measured["first-call-warm"].value == 7.0


def _stopped(*_: Any, **__: Any) -> paired.Comparison:
    raise ClockError("the clock stood still")


def test_a_clock_that_stands_still_leaves_out_figures_and_why(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed._Measuring, "_paired", _stopped)
    finding = speed.verify(trial)
    assert not finding.faults
    measured = figures(finding)
    assert measured["latency"].value is None
    assert measured["latency"].reason == "the clock stood still"
    assert "speed-up" not in measured
    assert measured["peak-memory"].value == 6 * 4 * 4


@pytest.mark.parametrize("says", [0.0, -5.0, math.nan, math.inf])
def test_a_first_call_that_takes_no_time_is_absent(trial: Trial, monkeypatch: pytest.MonkeyPatch, says: float) -> None:
    monkeypatch.setattr(Cpu, "elapsed", lambda *_: says)
    monkeypatch.setattr(speed._Measuring, "_paired", _stopped)
    measured = figures(speed.verify(trial))
    for name in ("first-call-cold", "first-call-warm"):
        assert measured[name].value is None
        assert measured[name].reason == f"cpu: expected 1 calls to take a positive time, the clock says {says} s"


def test_a_clock_that_fails_later_leaves_out_just_what_it_times(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.measure.roof.matmul_peak", _stopped)
    finding = speed.verify(trial)
    assert [m.name for m in finding.measurements].count("latency") == 1
    measured = figures(finding)
    assert measured["latency"].value
    assert (measured["flops"].value, measured["flops"].reason) == (None, "the clock stood still")


@pytest.mark.slow
def test_memory_that_is_not_known_is_absent_with_the_reason(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "peak", lambda *_: Peak(None, "it offers no memory statistics"))
    measured = figures(speed.verify(trial))
    assert measured["peak-memory"] == Measurement("peak-memory", None, "B", reason="it offers no memory statistics")


@pytest.mark.slow
def test_what_the_chip_says_is_kept_and_throttling_marked(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    joules = itertools.count(0.0, 10.0)

    class Telling(Cpu):
        def telemetry(self) -> Telemetry:
            energy = next(joules)
            return Telemetry(2000.0, 60.0, energy, f"{energy:.0f} times since the machine started")

    monkeypatch.setattr(speed, "POWERED", 0.01)
    measured = figures(speed.verify(replace(trial, device=Telling())))
    assert (measured["clock"].value, measured["temperature"].value) == (2000.0, 60.0)
    assert measured["throttled"].reason == "10 times since the machine started"
    latency, energy = measured["latency"].value, measured["energy"].value
    assert latency is not None
    assert energy is not None
    assert 0 < energy <= 10.0 / 0.01 * latency
    assert not {"clock", "throttled", "energy"} & figures(speed.verify(trial)).keys()


def test_a_ratio_is_of_this_process_and_judges_nothing(trial: Trial) -> None:
    assert speed.ratio(replace(trial, technique=Acting(lambda _, out: out * 2))).ratio > 0


def test_a_slow_case_is_called_a_few_times_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: int, out: Tensor) -> Tensor:
        time.sleep(0.02)
        return out

    monkeypatch.setattr(speed, "settle", lambda _: None)
    monkeypatch.setattr(speed, "PROCESS_SECONDS", 0.01)
    technique = Acting(slow)
    record = bench(Store(tmp_path), technique, WORKLOAD, Cpu()).ratio(replace(CASE, technique=technique.name))
    assert isinstance(record, paired.Comparison)
    assert record.pairs == 4
    # Two calls find how many make a block; four pairs are measured, though one takes longer than a round has.
    assert next(technique.calls) == technique.warmups + 2 + 4


@pytest.mark.slow
def test_a_contender_that_is_compared_twice_warms_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[object] = []
    monkeypatch.setattr(speed, "settle", warmed.append)
    monkeypatch.setattr(speed, "compare", partial(paired.compare, looks=(0.001,)))
    measuring = speed._Measuring(
        Trial(replace(CASE, mode=Mode.FORWARD), named(EAGER, "eager"), WORKLOAD, Cpu(), Store(tmp_path))
    )
    first, two, three = (measuring._eager("float32") for _ in range(3))
    measuring._paired(first, two)
    measuring._paired(three, two)
    assert warmed == [first.timed, two.timed, three.timed]


@pytest.mark.parametrize(("latency", "error"), [(speed.SLOW / 2, paired.ERROR), (speed.SLOW, speed.PROCESS_ERROR)])
def test_slow_calls_have_fewer_pairs_beside_their_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency: float, error: float
) -> None:
    errors: list[float] = []

    def compared(
        _: object, base: Contender, candidate: Contender, looks: object = None, *, error: float = paired.ERROR
    ) -> paired.Comparison:
        errors.append(error)
        return paired.compare(lambda: 1.0, lambda: 1.0, looks=(0.001,), error=error)

    monkeypatch.setattr(speed._Measuring, "_paired", compared)
    workload = replace(WORKLOAD, dtypes=frozenset({"float32", "float16"}))
    case = replace(CASE, mode=Mode.FORWARD, dtype="float16")
    measuring = speed._Measuring(Trial(case, named(EAGER, "eager"), workload, Cpu(), Store(tmp_path)))
    measuring._same_precision(measuring._eager("float16"), latency)
    assert errors == [error]
