"""Experiments of claims, against figures worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from claims_harness import KIB, MIB, experiments, sides
from technique_harness import StubDevice

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.units import duration, size
from accelcheck.devices import devices
from accelcheck.devices.base import Device
from accelcheck.experiments import curve
from accelcheck.experiments.claims import applied, attention, chains, tensors
from accelcheck.experiments.claims.catalogue import Measured, What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side, measured
from accelcheck.experiments.curve import WrongError
from accelcheck.measure.curve import Form, Gap, Point, Shapes
from accelcheck.measure.memory import held
from accelcheck.measure.paired import Comparison
from accelcheck.measure.paired import SpeedVerdict as Answered
from accelcheck.techniques.base import Technique
from accelcheck.workloads.base import Problem, Program, Workload

# Figures


def test_a_speed_up_and_the_time_that_something_takes_longer_are_the_clocks() -> None:
    comparison = measured(sides(0.004, 0.001), What.SPEED_UP, 1.5)
    assert (comparison.value, comparison.low, comparison.high) == pytest.approx((4.0, 4.0, 4.0))
    assert comparison.how.startswith("1 ms against 4 ms, ")
    for figure in (0.0, 2.0):
        comparison = measured(sides(0.001, 0.0025), What.EXTRA_TIME, figure)
        assert (comparison.value, comparison.low, comparison.high) == pytest.approx((1.5, 1.5, 1.5))
        assert comparison.how.startswith("2.5 ms against 1 ms, ")


def test_the_interval_of_a_figure_is_that_of_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelcheck.experiments.claims import experiment

    result = Comparison(Answered.UNDECIDED, 0.5, 0.4, 0.8, 9, 1.0, (1.0,), (0.5,))
    monkeypatch.setattr(experiment, "compare", lambda *_: result)
    fast = measured(sides(0.004, 0.001), What.SPEED_UP, 2.0)  # the other's times are halved for the comparison
    assert (fast.value, fast.low, fast.high) == pytest.approx((4.0, 2.5, 5.0))
    slow = measured(sides(0.004, 0.001), What.EXTRA_TIME, 1.0)  # and doubled for this one
    assert (slow.value, slow.low, slow.high) == pytest.approx((0.0, -0.2, 0.6))


def test_measuring_ends_when_it_is_known_whether_the_claim_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as fast is no question at the first look; twice as fast where two is promised is one until the last."""
    from accelcheck.experiments.claims import experiment

    asked: list[tuple[float, float]] = []

    def compare(base: Callable[[], float], candidate: Callable[[], float]) -> Any:
        asked.append((base(), candidate()))
        raise InterruptedError

    monkeypatch.setattr(experiment, "compare", compare)
    for what, figure in ((What.SPEED_UP, 2.0), (What.EXTRA_TIME, 0.5)):
        with pytest.raises(InterruptedError):
            measured(sides(0.004, 0.002), what, figure)
    assert [round(seconds, 9) for pair in asked for seconds in pair] == [0.002, 0.002, 0.006, 0.002]


def test_memory_counts_what_is_held_and_what_is_allocated_to_the_byte() -> None:
    device = StubDevice()
    x = torch.zeros(MIB)  # 4 MiB
    contest = Contest(
        Side(lambda: x + x, device, held=4 * MIB), Side(lambda: x[: MIB // 2] * 2.0, device, held=2 * MIB)
    )
    comparison = measured(contest, What.MEMORY, 0.5)
    assert comparison.how == "4 MiB against 8 MiB"
    assert (
        comparison.value == comparison.low == comparison.high == pytest.approx(0.5, abs=1e-5)
    )  # a factor takes 8 bytes


def test_what_an_earlier_call_left_is_freed_before_memory_is_measured() -> None:
    device = StubDevice()
    done: list[str] = []
    side = Side(lambda: done.append("call"), device, 1, lambda: done.append("ready"))
    measured(Contest(side, side), What.MEMORY, 0.5)
    assert done == ["call", "ready", "call"] * 2


def test_packed_weights_count_too() -> None:
    assert held([torch.zeros(4), (torch.zeros(2, dtype=torch.int8), [torch.zeros(1)]), None, 7]) == 16 + 2 + 4


def test_times_and_sizes_are_in_units_that_suit_them() -> None:
    assert [duration(seconds) for seconds in (2.5, 0.0031, 4.2e-5)] == ["2.5 s", "3.1 ms", "42 us"]
    assert [size(count) for count in (12, 3 * MIB)] == ["12 B", "3 MiB"]


def contested(experiment: Experiment, what: What, device: Device | None = None) -> Measured:
    with experiment.contest(StubDevice() if device is None else device) as contest:
        return measured(contest, what, 0.5)


@pytest.mark.parametrize(
    ("name", "plain", "saving"),
    [
        # The operand and the result, against the operand; the number that is added takes 8 bytes, and 4 in FP32.
        ("inplace-add", 8 * MIB + 12, 4 * MIB + 12),
        ("inplace-relu", 8 * MIB, 4 * MIB),
        # Operand and weight, product, activation; against operand and weight, and the product that becomes it.
        ("inplace-matmul", 48 * MIB + 16 * KIB, 32 * MIB + 16 * KIB),
    ],
)
def test_in_place_saves_what_is_worked_out_by_hand(name: str, plain: int, saving: int) -> None:
    assert contested(experiments()[name], What.MEMORY).value == pytest.approx(1 - saving / plain, abs=1e-7)


def test_an_operator_that_is_wrong_in_place_is_not_measured() -> None:
    broken = tensors.InPlace("x", ((64,),), lambda x: x.relu(), lambda x: x.abs_(), 0)
    with pytest.raises(WrongError, match="expected the bits of the operator out of place"):
        contested(broken, What.MEMORY)


def test_the_strided_operand_has_the_values_of_the_dense_one_and_other_strides() -> None:
    seen: list[torch.Tensor] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x + 0.0

    with tensors.Strided("x", ((6, 8),), (0, 1), noting, 0).contest(StubDevice()) as contest:
        seen.clear()
        contest.plain.call()
        contest.fast.call()
        dense, strided = seen
    assert torch.equal(dense, strided)
    assert (dense.stride(), strided.stride()) == ((8, 1), (1, 6))


def test_an_operator_that_reads_strides_wrongly_is_not_measured() -> None:
    def blind(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(x.shape, (x.size(1), 1)) * 1.0 if x.dtype == torch.float32 else x * 1.0

    with pytest.raises(WrongError, match="expected errors of"):
        contested(tensors.Strided("x", ((6, 8),), (0, 1), blind, 0), What.EXTRA_TIME)


def test_a_product_may_err_as_a_sum_in_any_order_and_no_more() -> None:
    operands = tensors.drawn(StubDevice(), (16, 512), (512, 16))
    tensors.check(torch.matmul, operands, 512)

    def lossy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.bfloat16() @ b.bfloat16()).float() if a.dtype == torch.float32 else a @ b

    def poisoned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b * (math.nan if a.dtype == torch.float32 else 1.0)

    for wrong in (lossy, poisoned):
        with pytest.raises(WrongError):
            tensors.check(wrong, operands, 512)


def test_attention_written_out_is_attention() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention.written_out(q, k, v), expected)


def test_memory_of_flash_attention_grows_less_than_of_attention_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LENGTHS", (1024, 2048))
    assert attention._growth(StubDevice(), "float32").value < 2.1
    monkeypatch.setattr(attention, "flash", attention.written_out)
    assert attention._growth(StubDevice(), "float32").value > 3.9


class Doubled(Technique):
    """Wrong by a factor, or not at all: nothing but its own word shows that it ran."""

    name = family = "doubled"
    promise = source = "none"

    def __init__(self, factor: float = 1.0, *, engaged: bool = True) -> None:
        self.factor = factor
        self.engaged = engaged
        self.finished = 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        module = program.module
        program.call = lambda *inputs: module(*inputs) * self.factor

    def evidence(self, *_: Any) -> Any:
        return [Evidence("it ran", "so it says", engaged=self.engaged)]

    def finish(self) -> None:
        self.finished += 1


def _small(generator: torch.Generator, extent: int) -> Problem:
    return Problem(
        applied.MatmulRelu(), (torch.randn(8, 16, generator=generator), torch.randn(16, 4, generator=generator))
    )


SMALL = Workload("claim-small", "A small product.", _small)


def attempt(technique: Technique, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "techniques", lambda: {technique.name: technique})
    cpu = devices()["cpu"]
    with applied.Applied("x", technique.name, SMALL).contest(cpu) as contest:
        contest.plain.call()
        contest.fast.call()


def test_a_technique_is_judged_as_a_case_is_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Doubled()
    attempt(right, monkeypatch)
    assert right.finished >= 2, "what it leaves behind is undone after judging and at the end"
    for wrong, message in (
        (Doubled(1.05), "doubled/claim-small/cpu/float32/forward: out: view"),
        (Doubled(engaged=False), "not engaged: it ran"),
    ):
        with pytest.raises(WrongError, match=message):
            attempt(wrong, monkeypatch)
        assert wrong.finished


def test_a_technique_that_goes_wrong_while_it_is_timed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = Doubled()
    monkeypatch.setattr(applied, "techniques", lambda: {technique.name: technique})
    with (
        pytest.raises(WrongError, match="after timing"),
        applied.Applied("x", technique.name, SMALL).contest(devices()["cpu"]),
    ):
        technique.factor = 1.05


def test_scripted_matmul_relu_runs_and_its_eager_side_is_the_module() -> None:
    with experiments()["torchscript-matmul-relu"].contest(devices()["cpu"]) as contest:
        fast, plain = contest.fast.call(), contest.plain.call()
        assert isinstance(fast, torch.Tensor)
        assert isinstance(plain, torch.Tensor)
        assert fast.shape == plain.shape == (128, 512)
        operands = 4 * (128 * 256 + 256 * 512)
        assert contest.fast.held == contest.plain.held == operands


def test_half_precision_halves_what_is_held() -> None:
    with experiments()["fp16"].contest(devices()["cpu"]) as contest:
        weights = 512 * 1024 + 1024 * 1024 + 10 * 1024 + 2 * 1024 + 10
        assert contest.plain.held == 4 * (weights + 128 * 512)
        assert contest.fast.held == 2 * (weights + 128 * 512)


@pytest.mark.slow
def test_int8_weights_are_counted_where_they_are_packed() -> None:
    with experiments()["int8-dynamic"].contest(devices()["cpu"]) as contest:
        weights, biases, inputs = 512 * 1024 + 1024 * 1024 + 10 * 1024, 4 * (2 * 1024 + 10), 4 * 128 * 512
        scales = 3 * (4 + 8)  # of each layer's output, which is FP32: an FP32 number and an int64, both unused
        assert contest.fast.held == weights + biases + inputs + scales


def on(kind: str, *features: str) -> StubDevice:
    device = StubDevice(kind, features)
    device.dtypes = frozenset({"float32", "float16"})
    return device


@pytest.mark.parametrize(
    ("experiment", "device", "code"),
    [
        ("non-contiguous-matmul", on("xla"), Code.NO_FEATURE),
        ("flash-attention", on("xla"), Code.NO_BACKEND),
        ("tensorrt", on("cpu"), Code.NO_BACKEND),
        ("cupy-matmul", on("cpu"), Code.NO_FEATURE),
        ("xla-matmul", on("cpu"), Code.NO_BACKEND),
        ("int8-dynamic", on("cpu"), Code.NO_FEATURE),
        ("amp-training", on("cpu"), Code.NO_FEATURE),
        ("fp16", StubDevice(), Code.NO_DTYPE),
        ("compile-static-30", on("cpu", "inductor"), Code.OK),
        ("compile-static-few", on("other"), Code.OK),
        ("xla-matmul", on("xla"), Code.OK),
    ],
)
def test_what_does_not_exist_is_answered_as_the_technique_does(experiment: str, device: Device, code: Code) -> None:
    assert experiments()[experiment].answer(device).code is code


def test_autocast_trains_in_what_the_device_is_made_for() -> None:
    training = experiments()["amp-training"]
    assert isinstance(training, applied.Applied)
    assert training.technique(on("cuda")).name == "grad-scaler-fp16"
    assert training.technique(on("xla")).name == "amp-bf16"


def test_the_product_of_the_host_is_timed_by_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "LEFT", (8, 16))
    monkeypatch.setattr(tensors, "RIGHT", (16, 4))
    device = on("xla")
    with tensors.XlaMatmul().contest(device) as contest:
        assert contest.plain.clock is devices()["cpu"]
        assert contest.fast.clock is device
        assert torch.equal(contest.plain.call(), contest.fast.call())  # type: ignore[arg-type]  # both are tensors


def point(count: int, ratio: float) -> Point:
    return Point(
        count, Shapes.FIXED, Form.STATIC, 1e-5, 1e-5 * ratio, ratio, ratio - 0.1, ratio + 0.1, 9, 1.0, 0.0, 1, 0
    )


def test_few_statements_are_as_slow_as_the_fastest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {1: 9.0, 2: 4.0, 3: 1.5, 4: 2.0}
    asked = []

    def measured_at(device: object, count: int, shapes: Shapes, form: Form) -> Point:
        asked.append((shapes, form))
        return point(count, ratios[count])

    monkeypatch.setattr(curve, "point", measured_at)
    comparison = contested(chains.Few(Form.DYNAMIC, Shapes.VARYING), What.EXTRA_TIME)
    assert asked == [(Shapes.VARYING, Form.DYNAMIC)] * 4
    assert (comparison.value, comparison.low, comparison.high) == pytest.approx((0.5, 0.4, 0.6))
    assert "at 3 statements" in comparison.how
    monkeypatch.setattr(curve, "point", lambda *_: Gap(1, Shapes.FIXED, Form.STATIC, "no compiler"))
    with pytest.raises(WrongError, match="1 statements: no compiler"):
        contested(chains.Few(Form.STATIC, Shapes.FIXED), What.EXTRA_TIME)
