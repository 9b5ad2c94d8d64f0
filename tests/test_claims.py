"""Claims: the data and what is refused of it, outcomes, experiments against figures worked out by hand, and the command."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from technique_harness import StubDevice

from accelcheck import cli
from accelcheck.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.case import Evidence, Mode
from accelcheck.claims import applied, attention, catalogue, chains, products, run, tensors
from accelcheck.claims.catalogue import Answer, Claim, ClaimsError, Measured, Outcome, What, judged
from accelcheck.claims.experiment import Contest, Experiment, Side, measured, telling
from accelcheck.commands import claims as command
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.devices.base import Memory
from accelcheck.matrix import devices
from accelcheck.measure.curve import Form, Gap, Point, Shapes
from accelcheck.measure.memory import held
from accelcheck.measure.paired import Answer as Answered
from accelcheck.measure.paired import Comparison
from accelcheck.qualify import curve
from accelcheck.qualify.curve import WrongError
from accelcheck.report import claims as report
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.units import duration, size
from accelcheck.workloads.base import Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Program

KIB, MIB = 1 << 10, 1 << 20


@cache
def experiments() -> Mapping[str, Experiment]:
    return run.experiments()


@cache
def claims() -> tuple[Claim, ...]:
    return tuple(catalogue.load(catalogue.PACKAGED, given()))


def given() -> dict[str, frozenset[What]]:
    return {name: one.gives for name, one in experiments().items()}


def claim(what: What, figure: float, name: str = "a", experiment: str = "one") -> Claim:
    least, most = (None, figure) if what.bounded else (figure, None)
    return Claim(name, experiment, "some work", what, least, most, ("gpu",), "", "An article's.")


# The data

PROMISED = {
    "torchscript-matmul-relu-speed": 1.5,
    "amp-training-speed": 2.5,
    "amp-training-memory": 0.5,
    "flash-attention-speed": 5.0,
    "flash-attention-error": 1e-4,
    "flash-attention-memory": 2.0,
    "tensorrt-speed": 4.2,
    "cupy-matmul-speed": 82.0,
    "non-contiguous-matmul-time": 0.5,
    "non-contiguous-convolution-time": 0.75,
    "non-contiguous-transpose-time": 1.5,
    "inplace-add-memory": 0.5,
    "inplace-relu-memory": 0.5,
    "inplace-matmul-memory": 0.33,
    "inplace-convolution-memory": 0.33,
    "int8-dynamic-speed": 2.5,
    "int8-dynamic-memory": 0.6,
    "int8-static-speed": 3.3,
    "int8-static-memory": 0.65,
    "fp16-speed": 2.0,
    "fp16-memory": 0.5,
    "checkpointing-memory": 0.5,
    "compile-static-speed": 5.32,
    "compile-dynamic-speed": 3.38,
    "compile-static-few-time": 0.0,
    "compile-dynamic-few-time": 0.0,
    "compile-amp-training-speed": 1.8,
    "compile-amp-training-memory": 0.4,
    "xla-matmul-speed": 1.0,
}


def test_the_packaged_claims_are_those_that_were_asked_for() -> None:
    assert {one.name: one.figure for one in claims()} == PROMISED
    assert next(one for one in claims() if one.name == "amp-training-speed").most == 3.5


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_each_has_an_experiment_that_measures_it_and_words_for_people(name: str) -> None:
    one = next(one for one in claims() if one.name == name)
    assert one.what in experiments()[one.experiment].gives
    assert one.workload
    assert one.published.endswith(".")
    assert one.source or "without an address" in one.published, "a claim without a source says so"


def test_every_experiment_serves_a_claim() -> None:
    assert {one.experiment for one in claims()} == set(experiments())


ENTRY = {
    "name": '"mine"',
    "experiment": '"fp16"',
    "workload": '"some work"',
    "what": '"speed-up"',
    "least": "2.0",
    "devices": '["gpu"]',
    "source": '"https://example.org/"',
    "published": '"An article\'s."',
}


def written(path: Path, **changes: str | None) -> Path:
    entry = {**ENTRY, **changes}
    lines = [f"{field} = {value}" for field, value in entry.items() if value is not None]
    path.write_text("[[claim]]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        *[({field: None}, field, "missing") for field in ENTRY if field != "name"],
        ({"name": '""'}, "name", "expected a text"),
        ({"workload": "7"}, "workload", "expected a text, got 7"),
        ({"experiment": '"fp17"'}, "experiment", "Did you mean 'fp16'?"),
        ({"what": '"fun"'}, "what", "expected one of speed-up, extra-time, memory, error, growth"),
        ({"what": '"error"', "least": None, "most": "0.1"}, "what", "experiment fp16 measures memory, speed-up"),
        ({"least": "0.0"}, "least", "from 0.01 to 1e+06"),
        ({"least": "-2.0"}, "least", "got -2.0"),
        ({"least": "nan"}, "least", "got nan"),
        ({"least": "inf"}, "least", "got inf"),
        ({"least": "true"}, "least", "got True"),
        ({"least": '"2x"'}, "least", "got '2x'"),
        ({"most": "1.0"}, "most", "expected no less than 'least', 2, got 1"),
        ({"what": '"memory"', "least": "50.0"}, "least", "from 0.001 to 1 for memory"),
        ({"devices": "[]"}, "devices", "expected a list of cpu, gpu, tpu"),
        ({"devices": '["cuda"]'}, "devices", "got ['cuda']"),
        ({"devices": '"gpu"'}, "devices", "expected a list"),
        ({"source": '"http://example.org"'}, "source", "begins with https://"),
        ({"figure": "2.0"}, "figure", "unknown; legal are"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_with_file_entry_and_field(
    tmp_path: Path, changes: dict[str, str | None], field: str, said: str
) -> None:
    path = written(tmp_path / "mine.toml", **changes)
    with pytest.raises(ClaimsError) as refused:
        catalogue.load(path, given())
    text = str(refused.value)
    assert text.startswith(f"{path}: claim 1 (")
    assert f"field {field!r}: " in text
    assert said in text


def test_an_entry_without_a_name_is_known_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(ClaimsError, match="claim 1: field 'name': missing"):
        catalogue.load(written(tmp_path / "mine.toml", name=None), given())


def test_figures_have_the_end_that_their_kind_needs(tmp_path: Path) -> None:
    growing = {"experiment": '"flash-attention"', "what": '"growth"'}
    with pytest.raises(ClaimsError, match="field 'least': a claim of growth has an upper end alone"):
        catalogue.load(written(tmp_path / "a.toml", **growing), given())
    with pytest.raises(ClaimsError, match="field 'most': missing"):
        catalogue.load(written(tmp_path / "b.toml", **growing, least=None), given())
    (one,) = catalogue.load(written(tmp_path / "c.toml", **growing, least=None, most="2"), given())
    assert one.figure == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"expected tables \[\[claim\]\] and nothing else, got nothing"),
        ("[[claim]\n", "cannot be read"),
        ("claim = []\n", "expected tables"),
        ("claim = [1]\n", "claim 1: field 'claim': expected a table, got int"),
        ("[[claim]]\n[other]\n", "got claim, other"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ClaimsError, match=said) as refused:
        catalogue.load(path, given())
    assert str(path) in str(refused.value)


def test_an_absent_file_and_a_name_that_is_there_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClaimsError, match="cannot be read"):
        catalogue.load(tmp_path / "absent.toml", given())
    path = written(tmp_path / "mine.toml")
    path.write_text(path.read_text() * 2)
    with pytest.raises(ClaimsError, match="claim 2: field 'name': 'mine' is the name of another one"):
        catalogue.load(path, given())


# Outcomes


@pytest.mark.parametrize(
    ("what", "figure", "low", "high", "expected"),
    [
        (What.SPEED_UP, 1.5, 1.5, 1.9, Outcome.CONFIRMED),
        (What.SPEED_UP, 1.5, 1.49, 1.9, Outcome.UNDECIDED),
        (What.SPEED_UP, 1.5, 1.0, 1.49, Outcome.NOT_CONFIRMED),
        (What.EXTRA_TIME, 0.0, 0.0, 0.1, Outcome.CONFIRMED),
        (What.EXTRA_TIME, 0.0, -0.1, 0.1, Outcome.UNDECIDED),
        (What.EXTRA_TIME, 0.5, -0.1, 0.1, Outcome.NOT_CONFIRMED),
        (What.ERROR, 1e-4, 1e-4, 1e-4, Outcome.CONFIRMED),
        (What.ERROR, 1e-4, 1.1e-4, 1.1e-4, Outcome.NOT_CONFIRMED),
        (What.GROWTH, 2.0, 1.9, 2.1, Outcome.UNDECIDED),
        (What.MEMORY, 0.5, 0.4951, 0.4951, Outcome.CONFIRMED),  # 50 % in whole percents
        (What.MEMORY, 0.5, 0.4949, 0.4949, Outcome.NOT_CONFIRMED),
        (What.SPEED_UP, 1.5, math.nan, 2.0, Outcome.NOT_MEASURABLE),
        (What.SPEED_UP, 1.5, 2.0, math.inf, Outcome.NOT_MEASURABLE),
    ],
)
def test_a_claim_is_confirmed_only_where_the_whole_interval_reaches_it(
    what: What, figure: float, low: float, high: float, expected: Outcome
) -> None:
    assert judged(claim(what, figure), Measured((low + high) / 2, low, high, "")).outcome is expected


# Figures


class Clocked(StubDevice):
    """Calls take the seconds that they return."""

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        return times * float(call())  # type: ignore[arg-type]  # those of these tests are numbers


def sides(plain: object, fast: object, device: Device | None = None) -> Contest:
    place = Clocked() if device is None else device
    return Contest(Side(lambda: plain, place), Side(lambda: fast, place))


def test_a_speed_up_and_the_time_that_something_takes_longer_are_the_clocks() -> None:
    found = measured(sides(0.004, 0.001), What.SPEED_UP, 1.5)
    assert (found.value, found.low, found.high) == pytest.approx((4.0, 4.0, 4.0))
    assert found.how.startswith("1 ms against 4 ms, ")
    for figure in (0.0, 2.0):
        found = measured(sides(0.001, 0.0025), What.EXTRA_TIME, figure)
        assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
        assert found.how.startswith("2.5 ms against 1 ms, ")


def test_the_interval_of_a_figure_is_that_of_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelcheck.claims import experiment

    found = Comparison(Answered.UNDECIDED, 0.5, 0.4, 0.8, 9, 1.0, (1.0,), (0.5,))
    monkeypatch.setattr(experiment, "compare", lambda *_: found)
    fast = measured(sides(0.004, 0.001), What.SPEED_UP, 2.0)  # the other's times are halved for the comparison
    assert (fast.value, fast.low, fast.high) == pytest.approx((4.0, 2.5, 5.0))
    slow = measured(sides(0.004, 0.001), What.EXTRA_TIME, 1.0)  # and doubled for this one
    assert (slow.value, slow.low, slow.high) == pytest.approx((0.0, -0.2, 0.6))


def test_measuring_ends_when_it_is_known_whether_the_claim_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as fast is no question at the first look; twice as fast where two is promised is one until the last."""
    from accelcheck.claims import experiment

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
    found = measured(contest, What.MEMORY, 0.5)
    assert found.how == "4 MiB against 8 MiB"
    assert found.value == found.low == found.high == pytest.approx(0.5, abs=1e-5)  # a factor takes 8 bytes


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


# Experiments


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


def test_memory_of_flash_attention_does_not_grow_as_that_of_attention_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "LENGTHS", (1024, 2048))
    assert attention._growth(StubDevice(), "float32").value < 2.1
    monkeypatch.setattr(attention, "flash", attention.written_out)
    assert attention._growth(StubDevice(), "float32").value > 3.9


class Doubled(Technique):
    """Wrong by a factor, or not at all: nothing but its own word shows that it ran."""

    name = "doubled"
    promise = source = "none"

    def __init__(self, factor: float = 1.0, *, engaged: bool = True) -> None:
        self.factor = factor
        self.engaged = engaged
        self.finished = 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
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
    for wrong, said in (
        (Doubled(1.05), "doubled/claim-small/cpu/float32/forward: out: view"),
        (Doubled(engaged=False), "not engaged: it ran"),
    ):
        with pytest.raises(WrongError, match=said):
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
    monkeypatch.setattr(products, "LEFT", (8, 16))
    monkeypatch.setattr(products, "RIGHT", (16, 4))
    device = on("xla")
    with products.XlaMatmul().contest(device) as contest:
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
    found = contested(chains.Few(Form.DYNAMIC, Shapes.VARYING), What.EXTRA_TIME)
    assert asked == [(Shapes.VARYING, Form.DYNAMIC)] * 4
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.4, 0.6))
    assert "at 3 statements" in found.how
    monkeypatch.setattr(curve, "point", lambda *_: Gap(1, Shapes.FIXED, Form.STATIC, "no compiler"))
    with pytest.raises(WrongError, match="1 statements: no compiler"):
        contested(chains.Few(Form.STATIC, Shapes.FIXED), What.EXTRA_TIME)


# Runs


class Scripted(Experiment):
    """Says what a test has it say."""

    name = "one"
    gives = frozenset(What)

    def __init__(self, answer: Capability = SUPPORTED, fault: Exception | None = None) -> None:
        self._answer = answer
        self._fault = fault
        self.contests = 0

    def answer(self, device: Device) -> Capability:
        del device
        return self._answer

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        del device
        self.contests += 1
        if self._fault is not None:
            raise self._fault
        yield replace(sides(0.004, 0.001), others={What.ERROR: lambda: Measured.exactly(1e-6, "exact")})


def answered(experiment: Scripted, device: Device, *chosen: Claim) -> list[Answer]:
    return list(run.answers(device, chosen, {"one": experiment}))


def test_claims_that_share_an_experiment_share_its_contest() -> None:
    experiment = Scripted()
    found = answered(experiment, Clocked(), claim(What.SPEED_UP, 9.0, "b"), claim(What.ERROR, 1e-4, "a"))
    assert [(one.claim.name, one.outcome) for one in found] == [
        ("a", Outcome.CONFIRMED),
        ("b", Outcome.NOT_CONFIRMED),
    ]
    assert experiment.contests == 1


def test_what_does_not_exist_is_not_tried() -> None:
    absent = unsupported(Code.NO_BACKEND, "none here")
    experiment = Scripted(absent)
    (found,) = answered(experiment, Clocked(), claim(What.SPEED_UP, 2.0))
    assert (found.outcome, found.reason, found.code, found.broken) == (
        Outcome.NOT_MEASURABLE,
        str(absent),
        "no-backend",
        False,
    )
    assert experiment.contests == 0


class Forgetful(Clocked):
    """Keeps no statistics of memory."""

    def __init__(self) -> None:
        super().__init__("fancy")

    def memory(self) -> Memory:
        return Memory(None, None, "it counts nothing")


def test_a_device_that_counts_no_memory_is_asked_for_the_rest() -> None:
    experiment = Scripted()
    memory, speed = answered(
        experiment, Forgetful(), claim(What.MEMORY, 0.5, "memory"), claim(What.SPEED_UP, 2.0, "speed")
    )
    assert (memory.outcome, memory.code) == (Outcome.NOT_MEASURABLE, "no-feature")
    assert "it counts nothing" in memory.reason
    assert speed.outcome is Outcome.CONFIRMED
    assert telling(Forgetful(), What.GROWTH).code is Code.NO_FEATURE
    answered(experiment, Forgetful(), claim(What.MEMORY, 0.5))
    assert experiment.contests == 1, "nothing is prepared where nothing can be told"


@pytest.mark.parametrize(
    ("fault", "reason", "broken"),
    [
        (WrongError("out: expected 1, got 2"), "out: expected 1, got 2", True),
        (ValueError("first line\nsecond"), "ValueError: first line", True),
        (Unsupported(unsupported(Code.NO_DTYPE, "not these inputs")), "unsupported [no-dtype] not these inputs", False),
    ],
)
def test_what_is_wrong_is_the_answer_to_all_claims_of_the_experiment(
    fault: Exception, reason: str, broken: bool
) -> None:
    found = answered(Scripted(fault=fault), Clocked(), claim(What.SPEED_UP, 2.0, "a"), claim(What.ERROR, 0.1, "b"))
    assert [(one.outcome, one.reason, one.broken) for one in found] == [(Outcome.NOT_MEASURABLE, reason, broken)] * 2


def test_a_clock_that_stands_still_gives_no_figure() -> None:
    class Stopped(Clocked):
        def elapsed(self, call: Callable[[], object], times: int) -> float:
            del call, times
            return 0.0

    class Still(Scripted):
        @contextlib.contextmanager
        def contest(self, device: Device) -> Iterator[Contest]:
            yield sides(0.0, 0.0, device)

    (found,) = answered(Still(), Stopped(), claim(What.SPEED_UP, 2.0))
    assert found.reason.startswith("ClockError: ")
    assert found.measured is None


# Report

ANSWERS = [
    judged(claim(What.SPEED_UP, 1.5, "speed"), Measured(1.02, 1.0, 1.04, "3 ms against 3 ms")),
    judged(claim(What.MEMORY, 0.5, "memory"), Measured.exactly(0.5, "4 MiB against 8 MiB")),
    judged(claim(What.MEMORY, 0.4, "more"), Measured.exactly(-0.06, "9 MiB against 8 MiB")),
    judged(claim(What.ERROR, 1e-4, "error"), Measured.exactly(2e-7, "in float32")),
    judged(replace(claim(What.SPEED_UP, 2.5, "range"), most=3.5), Measured(3.0, 2.4, 3.2, "1 ms against 3 ms")),
    catalogue.absent(claim(What.EXTRA_TIME, 0.5, "time"), unsupported(Code.NO_FEATURE, "no strides")),
    catalogue.wrong(claim(What.GROWTH, 2.0, "growth"), "out: expected 1, got 2"),
]


def test_the_text_has_claim_beside_measurement_and_every_reason() -> None:
    lines = [" ".join(line.split()) for line in report.text(ANSWERS)]
    assert "speed at least 1.50x 1.02x (1.00x to 1.04x) not confirmed gpu" in lines
    assert "memory at least -50.0 % -50.0 % confirmed gpu" in lines
    assert "more at least -40.0 % +6.0 % not confirmed gpu" in lines
    assert "error at most 0.0001 relative 2e-07 relative confirmed gpu" in lines
    assert "range 2.50x to 3.50x 3.00x (2.40x to 3.20x) undecided gpu" in lines
    assert "time at least +50.0 % - not measurable here gpu" in lines
    assert "growth at most 2x a doubling - not measurable here gpu" in lines
    assert "time: unsupported [no-feature] no strides" in lines
    assert "growth: out: expected 1, got 2" in lines
    assert "speed: some work: 3 ms against 3 ms" in lines
    assert "speed, memory, more, error, range, time, growth: An article's." in lines
    assert lines[-1] == (
        "7 claims: 2 confirmed, 2 not confirmed, 1 undecided, 2 not measurable here; 1 of them wrong or with an error"
    )


def test_json_has_each_claim_by_name_with_its_source_and_its_figures() -> None:
    found = report.as_json(ANSWERS)["claims"]
    assert set(found) == {answer.claim.name for answer in ANSWERS}
    assert (found["speed"]["outcome"], found["speed"]["low"], found["speed"]["least"]) == ("not confirmed", 1.0, 1.5)
    assert (found["time"]["value"], found["time"]["code"]) == (None, "no-feature")
    assert json.loads(json.dumps(found)) == found


# The command


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command without a probe; ``answers`` of each claim are all of the one kind that a test sets."""
    told: dict[str, Any] = {"make": lambda one: judged(one, Measured.exactly(one.figure, "as promised"))}

    def answers(device: object, chosen: list[Claim], known: object) -> Iterator[Answer]:
        told["chosen"] = [one.name for one in chosen]
        yield from (told["make"](one) for one in chosen)

    monkeypatch.setattr(command, "refusal", lambda _: None)
    monkeypatch.setattr(run, "answers", answers)
    return told


def test_the_command_measures_the_claims_that_were_asked_for_and_writes_them(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "claims.json"
    assert cli.main(["claims", "--claim", "int8-*", "--claim", "fp16-speed", "--json", str(path)]) == GREEN
    assert sorted(scripted["chosen"]) == [
        "fp16-speed",
        "int8-dynamic-memory",
        "int8-dynamic-speed",
        "int8-static-memory",
        "int8-static-speed",
    ]
    data = json.loads(path.read_text())
    assert (data["kind"], sorted(data["claims"])) == ("claims", sorted(scripted["chosen"]))
    assert "5 claims: 5 confirmed" in capsys.readouterr().out


def test_a_claim_that_is_not_confirmed_is_green_and_a_wrong_result_is_not(scripted: dict[str, Any]) -> None:
    scripted["make"] = lambda one: judged(one, Measured.exactly(one.figure * 0.5, "less"))
    assert cli.main(["claims", "--claim", "fp16-*"]) == GREEN
    scripted["make"] = lambda one: catalogue.wrong(one, "out: expected 1, got 2")
    assert cli.main(["claims"]) == RED
    scripted["make"] = lambda one: catalogue.absent(one, unsupported(Code.NO_BACKEND, "none here"))
    assert cli.main(["claims"]) == NOTHING


def test_unknown_claims_and_devices_are_answered_with_the_legal_ones(
    scripted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["claims", "--claim", "fp15-speed"]) == USAGE
    said = capsys.readouterr().err
    assert "unknown claim 'fp15-speed'. Did you mean 'fp16-speed'? Legal values: " in said
    assert all(name in said for name in PROMISED)
    assert "chosen" not in scripted


def test_an_unknown_device_is_answered_with_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "--device", "cpuu"]) == USAGE
    assert "Did you mean 'cpu'? Legal values: cpu," in capsys.readouterr().err


def test_a_file_of_claims_that_is_wrong_ends_the_command_before_anything_is_measured(
    scripted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "PACKAGED", written(tmp_path / "mine.toml", least='"2x"'))
    assert cli.main(["claims"]) == USAGE
    assert "mine.toml: claim 1 (mine): field 'least'" in capsys.readouterr().err
    assert "chosen" not in scripted


def test_an_absent_device_is_said_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "refusal", lambda _: "no such hardware")
    assert cli.main(["claims", "--device", "cuda"]) == NOTHING
    assert "cuda: no such hardware" in capsys.readouterr().err


def test_declaring_the_commands_imports_no_torch() -> None:
    code = "import sys, accelcheck.commands.claims, accelcheck.commands.curve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
