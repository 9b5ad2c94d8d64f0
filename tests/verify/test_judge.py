"""Metadata first, then where NaN and infinities stand, then values; every fault is named by its path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from accelcheck.core.case import Figure
from accelcheck.verify.judge import Contract, check_metadata, judge, judge_together
from accelcheck.verify.reference import Layout, Reference
from accelcheck.verify.views import SIGNED, VIEWS, Reading

UNIT = 2.0**-24
DEEP = "out[1]['hidden']"
CPU = Contract("cpu")


def values() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(3, 4)


def layout(tensor: Tensor) -> Layout:
    return Layout(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())


def reference(tensors: dict[str, Tensor] | None = None, budget: float = 1e-6) -> Reference:
    """Reference of these tensors, or of one whose path has brackets; one budget for all."""
    tensors = {DEEP: values()} if tensors is None else tensors
    judged = [path for path, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()]
    return Reference(
        truth={path: t.double() if t.is_floating_point() else t for path, t in tensors.items()},
        layouts={path: layout(tensor) for path, tensor in tensors.items()},
        budgets={path: dict.fromkeys(VIEWS, budget) for path in judged},
        leanings={path: dict.fromkeys(SIGNED, (0.0,)) for path in judged},
        unit=UNIT,
        spacing=0.0,
        eager_excess=0.0,
    )


def metadata(result: dict[str, Tensor], against: Reference | None = None, contract: Contract = CPU) -> list[str]:
    return [str(fault) for fault in check_metadata(result, reference() if against is None else against, contract)]


def test_the_right_metadata_have_no_fault() -> None:
    assert metadata({DEEP: values()}) == []


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ({}, f"{DEEP}: missing: expected a tensor, got nothing"),
        ({DEEP: values(), "out[2]": values()}, "out[2]: unexpected: expected nothing, got a tensor of shape (3, 4)"),
        ({DEEP: values().to("meta")}, f"{DEEP}: device: expected cpu, got meta"),
        ({DEEP: values().double()}, f"{DEEP}: dtype: expected float32, got float64"),
        *(
            ({DEEP: values().reshape(shape)}, f"{DEEP}: shape: expected (3, 4), got {shape}")
            for shape in ((4, 3), (12,), (3, 4, 1), (1, 3, 4))
        ),
    ],
)
def test_what_is_unlike_the_oracles_is_named(result: dict[str, Tensor], line: str) -> None:
    assert metadata(result) == [line]


def test_other_strides_are_named_where_they_are_owed() -> None:
    turned = values().t().contiguous().t()
    assert metadata({DEEP: turned}) == [f"{DEEP}: strides: expected (4, 1), got (1, 3)"]
    assert metadata({DEEP: turned}, contract=Contract("cpu", strides=False)) == []


def test_gradients_owe_no_strides() -> None:
    path = "grad:weight"
    assert metadata({path: values().t().contiguous().t()}, reference({path: values()})) == []


def test_strides_of_size_one_and_of_nothing_mean_nothing() -> None:
    single, nothing = torch.empty(1, 4), torch.empty(0, 4)
    assert metadata({"out": single.as_strided((1, 4), (77, 1))}, reference({"out": single})) == []
    assert metadata({"out": nothing.as_strided((0, 4), (1, 9))}, reference({"out": nothing})) == []


@pytest.mark.parametrize(
    ("path", "lenient"), [("out", True), ("loss[0]", True), ("grad:w", False), ("parameter:w", False)]
)
def test_only_outputs_and_losses_may_have_the_dtype_of_autocast(path: str, lenient: bool) -> None:
    contract = Contract("cpu", dtypes=frozenset({"bfloat16"}))
    assert (metadata({path: values().bfloat16()}, reference({path: values()}), contract) == []) is lenient


def test_every_fault_is_told_in_one_go() -> None:
    told = metadata({"out": values().double()[:2], "more": values()}, reference({"out": values(), "lost": values()}))
    assert [line.split(":")[0] for line in told] == ["lost", "more", "out", "out"]


def faults(candidate: Tensor, truth: Tensor, budget: float = 1e-6) -> list[str]:
    return [str(fault) for fault in judge({DEEP: candidate}, reference({DEEP: truth}, budget)).faults]


def test_equal_values_pass_and_are_counted() -> None:
    judgement = judge({DEEP: values()}, reference())
    assert judgement.faults == ()
    assert sum(judgement.compared.values()) == 12
    assert [figure.view for figure in judgement.figures] == list(VIEWS)
    assert judgement.readings.keys() == {DEEP}


def test_a_value_that_differs_is_told_by_path_view_and_place() -> None:
    wrong = values()
    wrong[1, 2] += 0.5
    told = faults(wrong, values())
    assert any(line.startswith(f"{DEEP}: view row at [1, :]: expected at most 1.000e-06, got ") for line in told)
    assert any(line.startswith(f"{DEEP}: view column at [..., 2]: ") for line in told)
    assert any(line.startswith(f"{DEEP}: view element: ") for line in told)


@pytest.mark.parametrize("sign", [1, -1])
def test_signed_views_are_held_against_their_budget_by_size(sign: int) -> None:
    judgement = judge({DEEP: values() * (1 + sign * 1e-3)}, reference())
    (gain,) = (figure for figure in judgement.figures if figure.view == "gain")
    assert gain.measured == pytest.approx(1e-3, rel=1e-3)
    assert judgement.readings[DEEP]["gain"] == pytest.approx(sign * 1e-3, rel=1e-3)


@pytest.mark.parametrize("kind", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_fault_with_its_place(kind: float) -> None:
    wrong = values()
    wrong[2, 1] = kind
    (told,) = faults(wrong, values(), budget=1e9)
    assert told.startswith(f"{DEEP}: ")
    assert "pattern, 1 element differ, first at [2, 1]: expected 0 of them, got 1" in told


@pytest.mark.parametrize("kind", [math.nan, math.inf, -math.inf])
def test_what_the_oracle_has_must_be_there(kind: float) -> None:
    truth = values()
    truth[0, 0] = kind
    assert faults(truth.clone(), truth) == []
    (told,) = faults(values(), truth, budget=1e9)
    assert "1 element differ, first at [0, 0]: expected 1 of them, got 0" in told


def test_a_pattern_counts_the_elements_that_differ_not_how_many_more_there_are() -> None:
    truth, moved = values(), values()
    truth[0, 0] = moved[0, 1] = math.nan
    (told,) = faults(moved, truth, budget=1e9)
    assert "NaN pattern, 2 elements differ, first at [0, 0]: expected 1 of them, got 1" in told


def test_nan_in_the_oracle_is_no_wildcard() -> None:
    truth = values()
    truth[0, 0] = math.nan
    moved = values()
    moved[0, 1] = math.nan
    assert faults(moved, truth, budget=1e9)
    wrong = truth.clone()
    wrong[1, 1] = 100.0
    assert faults(wrong, truth)


def test_one_infinity_is_not_the_other_nor_nan() -> None:
    truth = values()
    truth[0, 0] = math.inf
    for kind in (-math.inf, math.nan):
        wrong = values()
        wrong[0, 0] = kind
        assert faults(wrong, truth, budget=1e9)


@pytest.mark.parametrize("kind", [math.nan, math.inf])
def test_a_result_of_nothing_finite_fails(kind: float) -> None:
    assert faults(torch.full((3, 4), kind), values(), budget=1e9)


def test_an_infinite_budget_is_the_only_one_that_passes_anything() -> None:
    assert faults(values() * 2, values(), budget=math.inf) == []
    assert faults(values() * 2, values(), budget=math.nan)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    truth = (values() % 2).to(dtype)
    assert faults(truth.clone(), truth, budget=1e9) == []
    wrong = truth.clone()
    wrong[2, 3] = not bool(wrong[2, 3])
    expected, got = truth[2, 3].item(), wrong[2, 3].item()
    assert faults(wrong, truth, budget=1e9) == [f"{DEEP}: value at [2, 3]: expected {expected}, got {got}"]


def test_a_scalar_integer_that_differs_is_told() -> None:
    assert faults(torch.tensor(3), torch.tensor(4)) == [f"{DEEP}: value: expected 4, got 3"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (5,)])
def test_every_shape_is_judged(shape: tuple[int, ...]) -> None:
    judgement = judge({DEEP: torch.ones(shape)}, reference({DEEP: torch.ones(shape)}))
    assert judgement.faults == ()
    assert sum(judgement.compared.values()) == math.prod(shape)


def test_a_figure_that_does_not_gate_fails_nothing() -> None:
    shifted = reference(budget=1e9)
    shifted.budgets[DEEP]["bias"] = 0.0  # type: ignore[index]  # a dict, as it was made above
    judgement = judge({DEEP: values() + 1e-3}, shifted)
    assert judgement.faults == ()
    (bias,) = (figure for figure in judgement.figures if figure.view == "bias")
    assert not bias.within


def test_negative_zero_is_zero() -> None:
    assert faults(torch.full((2, 2), -0.0), torch.zeros(2, 2), budget=0.0) == []


def test_an_integer_output_owes_its_dtype_whatever_floats_may_have() -> None:
    contract = Contract("cpu", dtypes=frozenset({"float32"}))
    (fault,) = check_metadata({"out": torch.tensor([1.0, 2.0])}, reference({"out": torch.tensor([1, 2])}), contract)
    assert str(fault) == "out: dtype: expected int64, got float32"


def test_a_pattern_that_differs_gives_no_reading() -> None:
    truth = values()
    truth[0, 0] = math.nan
    assert judge({DEEP: truth.clone()}, reference({DEEP: truth})).readings.keys() == {DEEP}
    assert judge({DEEP: values()}, reference({DEEP: truth})).readings == {}


def signed(gain: float = 0.0, bias: float = 0.0) -> Reading:
    """A reading with nothing but a direction."""
    return Reading(tuple({"gain": gain, "bias": bias}.get(view, 0.0) for view in VIEWS), (0, 0, 0), 0.0, finite=True)


Drawn = tuple[dict[str, Reading], Reference]


def drawn(gain: float = 0.0, bias: float = 0.0, *samples: float, unit: float = UNIT) -> Drawn:
    """A draw with its reading at `out`, and the gains of its rounding samples; their biases are 0."""
    leanings = {"out": {"gain": samples or (0.0,), "bias": (0.0,)}}
    against = Reference({}, {}, {}, leanings, unit, 0.0, 0.0)
    return {"out": signed(gain, bias)}, against


def together(draws: list[Drawn]) -> list[str]:
    return [str(fault) for fault in judge_together(draws).faults]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_same_direction_in_every_draw_is_a_fault(sign: int) -> None:
    # The mean of 2, 3, 4 and 3 millionths, against 2**-22.
    assert together([drawn(sign * n * 1e-6) for n in (2, 3, 4, 3)]) == [
        "out: view gain in all draws: expected at most 2.384e-07, got 3.000e-06"
    ]
    assert together([drawn(0.0, sign * 2.5)] * 3) == [
        "out: view bias in all draws: expected at most 2.000e+00, got 2.500e+00"
    ]


@pytest.mark.parametrize("other", [-1e-9, 0.0])
def test_directions_that_differ_are_no_fault_however_large_their_mean(other: float) -> None:
    draws = [drawn(gain) for gain in (1e-3, 1e-3, 1e-3, other)]
    assert together(draws) == []
    assert {figure.view: figure.measured for figure in judge_together(draws).figures} == {
        "gain in all draws": 0.0,
        "bias in all draws": 0.0,
    }


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_draws_say_nothing(count: int) -> None:
    judgement = judge_together([drawn(1.0, 1000.0)] * count)
    assert (judgement.faults, judgement.figures) == ((), ())


def test_the_budget_is_twice_the_largest_mean_of_the_samples() -> None:
    # The first samples of all draws lean by 2e-6 on average, the second by 3e-6 the other way, however large each is.
    samples = ((4e-6, -9e-6), (1e-6, -9e-6), (1e-6, 9e-6))
    assert together([drawn(5.9e-6, 0.0, *pair) for pair in samples]) == []
    (told,) = together([drawn(6.1e-6, 0.0, *pair) for pair in samples])
    assert told == "out: view gain in all draws: expected at most 6.000e-06, got 6.100e-06"


@pytest.mark.parametrize(
    ("eager", "allowed"), [(3e-6, 6e-6), (5e-6, 10e-6), (7e-6, 6e-6)], ids=["less", "explained", "not explained"]
)
def test_eager_widens_the_common_budget_as_far_as_the_samples_explain_it(eager: float, allowed: float) -> None:
    with_eager = [
        (readings, replace(against, eager={"out": {"gain": eager, "bias": 0.0}}))
        for readings, against in (drawn(allowed * 1.01, 0.0, 3e-6) for _ in range(3))
    ]
    (told,) = together(with_eager)
    assert f"expected at most {allowed:.3e}" in told
    # One draw without eager, and the samples alone decide.
    (told,) = together([*with_eager, drawn(allowed * 1.01, 0.0, 3e-6)])
    assert "expected at most 6.000e-06" in told


def test_what_eager_shows_beyond_the_samples_is_reported_and_gates_nothing() -> None:
    eager = {**dict.fromkeys(VIEWS, 1e-7), "element": -3e-6, "bias": 5e-6}
    against = replace(reference(), alone=reference().budgets, eager={DEEP: eager})
    judgement = judge({DEEP: values()}, against)
    assert not judgement.faults
    (told,) = (figure for figure in judgement.figures if figure.view not in VIEWS)
    assert told == Figure(DEEP, "eager's element", 3e-6, 1e-6, "", gates=False)


def test_the_common_floor_of_half_precision_is_that_of_float32() -> None:
    unit = 2.0**-8
    assert together([drawn(2.0**-22, 2.0**-15, unit=unit)] * 3) == []
    assert [line.split(":")[1] for line in together([drawn(1.1 * 2.0**-22, 1.1 * 2.0**-15, unit=unit)] * 3)] == [
        " view bias in all draws",
        " view gain in all draws",
    ]


def test_a_path_that_one_draw_has_no_reading_of_is_left_out() -> None:
    draws = [drawn(1e-3) for _ in range(4)]
    draws[2] = ({}, draws[2][1])
    assert together(draws) == []


@pytest.mark.parametrize(("factor", "close"), [(0.5, False), (1.5, True), (3.9, True), (4.1, False)])
def test_a_judgement_is_close_where_all_views_are_beyond_their_budget_by_little(factor: float, *, close: bool) -> None:
    budget = 1e-3
    against = reference(budget=1e9)
    plain = against.budgets[DEEP]
    first = Reference(**{**vars(against), "budgets": {DEEP: {**plain, "gain": budget}}})
    assert judge({DEEP: values() * (1 + factor * budget)}, first).near(1) == frozenset([DEEP] * close)


def test_what_is_wrong_besides_a_view_is_never_close() -> None:
    against = reference({DEEP: values(), "out[0]": torch.arange(3)}, budget=1e9)
    assert not judge({DEEP: values(), "out[0]": torch.arange(1, 4)}, against).near(1)
    assert not judge({DEEP: values() * math.nan, "out[0]": torch.arange(3)}, against).near(1)


@pytest.mark.parametrize(("factor", "close"), [(1.5, True), (4.1, False)])
def test_a_result_that_is_independent_of_a_wrong_one_is_close_by_itself(factor: float, *, close: bool) -> None:
    budget = 1e-3
    truth = {DEEP: values(), "out[0]": torch.arange(3)}
    against = reference(truth, budget=1e9)
    budgets = {**against.budgets, DEEP: {**against.budgets[DEEP], "gain": budget}}
    first = Reference(**{**vars(against), "budgets": budgets})
    judgement = judge({DEEP: values() * (1 + factor * budget), "out[0]": torch.arange(1, 4)}, first)
    assert judgement.near(1, divisible=True) == frozenset([DEEP] * close)
    assert not judgement.near(1)


def test_what_is_looked_at_again_replaces_its_own_faults_and_figures_alone() -> None:
    truth = {DEEP: values(), "out[0]": values()}
    against = reference(truth, budget=1e-3)
    both = judge({path: tensor * 1.5 for path, tensor in truth.items()}, against)
    wide = reference({DEEP: values()}, budget=1e9)
    again = both.amended(judge({DEEP: values() * 1.5}, wide), wide.judged)
    assert {fault.path for fault in both.faults} == set(truth)
    assert {fault.path for fault in again.faults} == {"out[0]"}
    assert [figure for figure in again.figures if figure.path == "out[0]"] == [
        figure for figure in both.figures if figure.path == "out[0]"
    ]
    assert {figure.allowed for figure in again.figures if figure.path == DEEP} >= {1e9}
    assert again.compared == both.compared


def test_an_amended_reference_has_the_other_ones_budgets_of_what_that_judges() -> None:
    truth = {DEEP: values(), "out[0]": values()}
    against, wide = reference(truth, budget=1e-3), reference(truth, budget=1e9)
    mended = against.amended(replace(wide, unjudged={"out[0]": "rounding decides it"}))
    assert mended.budgets[DEEP] == wide.budgets[DEEP]
    assert mended.budgets["out[0]"] == against.budgets["out[0]"]
    assert mended.judged == against.judged == set(truth)


@pytest.mark.parametrize(("count", "close"), [(1, True), (15, True), (16, False)])
def test_few_elements_far_beyond_their_budget_are_looked_at_twice_more(count: int, *, close: bool) -> None:
    truth = torch.linspace(1, 2, count)
    against = reference({DEEP: truth}, budget=1e9)
    against = replace(against, budgets={DEEP: {**against.budgets[DEEP], "gain": 1e-3}})
    judgement = judge({DEEP: truth * 1.009}, against)
    assert judgement.near(1, against) == frozenset([DEEP] * close)
    assert judgement.near(2, against) == frozenset([DEEP] * close)
