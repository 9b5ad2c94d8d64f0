"""Each view's formula, on values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from accelcheck.case import Figure
from accelcheck.verify.views import GATES, VIEWS, Pair, Reading, floor, ratio

UNIT = 2.0**-8


def pair(error: object, oracle: object) -> Pair:
    return Pair(torch.tensor(error, dtype=torch.float64), torch.tensor(oracle, dtype=torch.float64), UNIT)


MATRIX = pair([[0.0, 0.0], [0.6, 0.8]], [[3.0, 4.0], [0.0, 5.0]])
"""Rows have the sizes 5 and 5, columns 3 and the root of 41; all of it the root of 50."""


def read(view: str, seen: Pair) -> Reading:
    return VIEWS[view](seen)


def test_row_divides_by_its_row_and_the_mean_row() -> None:
    reading = read("row", MATRIX)
    assert reading.value == pytest.approx(1.0 / math.sqrt(25.0 + 25.0))
    assert reading.where == "[1, :]"


def test_column_divides_by_its_column_and_the_mean_column() -> None:
    reading = read("column", MATRIX)
    # 0.6 / sqrt(9 + 25) = 0.103, 0.8 / sqrt(41 + 25) = 0.098
    assert reading.value == pytest.approx(0.6 / math.sqrt(9.0 + 25.0))
    assert reading.where == "[..., 0]"


def test_global_is_the_relative_frobenius_error() -> None:
    assert read("global", MATRIX).value == pytest.approx(1.0 / math.sqrt(50.0))


def test_gain_is_the_part_of_the_error_along_the_oracle() -> None:
    assert read("gain", MATRIX).value == pytest.approx((0.8 * 5.0) / 50.0)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_gain_sees_a_common_factor_of_either_sign(factor: float) -> None:
    oracle = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
    assert read("gain", Pair.of(factor * oracle, oracle, UNIT)).value == pytest.approx(0.01)


def test_ulp_is_a_median_over_what_is_not_zero() -> None:
    # Errors of 1, 4 and 10 units in the last place; the fourth element has none to be measured in.
    oracle = [1.0, 2.0, -4.0, 0.0]
    error = [2 * UNIT * 1.0, 2 * UNIT * 8.0, 2 * UNIT * 40.0, 7.0]
    assert read("ulp", pair(error, oracle)).value == pytest.approx(4.0)


def test_bias_is_the_mean_sign() -> None:
    assert read("bias", pair([1.0, 2.0, -3.0, 0.0], [1.0] * 4)).value == pytest.approx(0.25)


def test_bias_does_not_gate_and_all_others_do() -> None:
    assert VIEWS.keys() - GATES == {"bias"}


def test_the_worst_row_of_many_dimensions_is_named_by_all_of_them() -> None:
    oracle = torch.ones(2, 3, 4, dtype=torch.float64)
    error = torch.zeros_like(oracle)
    error[1, 2, 3] = 0.5
    seen = Pair(error, oracle, UNIT)
    assert read("row", seen).where == "[1, 2, :]"
    assert read("column", seen).where == "[..., 3]"


def test_a_scalar_is_a_row_of_one() -> None:
    seen = pair(0.02, 2.0)
    assert read("global", seen).value == pytest.approx(0.01)
    assert read("gain", seen).value == pytest.approx(0.01)
    # The mean row is the row itself.
    assert read("row", seen).value == pytest.approx(0.01 / math.sqrt(2))
    assert read("row", seen).where == ""
    assert read("column", seen).value == pytest.approx(0.01 / math.sqrt(2))
    assert read("column", seen).where == ""


def test_a_vector_is_one_row() -> None:
    seen = pair([0.0, 0.3], [3.0, 4.0])
    assert read("row", seen).value == pytest.approx(0.3 / math.sqrt(50.0))
    assert read("row", seen).where == ""
    assert read("column", seen).value == pytest.approx(0.3 / math.sqrt(16.0 + 12.5))
    assert read("column", seen).where == "[..., 1]"


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 4)])
@pytest.mark.parametrize("view", VIEWS)
def test_an_empty_tensor_has_no_error(view: str, shape: tuple[int, ...]) -> None:
    nothing = torch.zeros(shape, dtype=torch.float64)
    assert read(view, Pair(nothing, nothing, UNIT)).value == 0.0


@pytest.mark.parametrize("view", VIEWS)
def test_no_error_is_zero_even_where_the_oracle_is(view: str) -> None:
    assert read(view, pair([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]])).value == 0.0
    assert read(view, pair([0.0], [0.0])).value == 0.0


@pytest.mark.parametrize("view", ["row", "column", "global"])
def test_an_error_against_nothing_is_infinite(view: str) -> None:
    assert read(view, pair([[0.0, 1e-30]], [[0.0, 0.0]])).value == math.inf


@pytest.mark.parametrize(("error", "size", "expected"), [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (1.0, 4.0, 0.25)])
def test_ratio(error: float, size: float, expected: float) -> None:
    assert ratio(error, size) == expected


def test_a_small_row_is_measured_against_the_mean_row() -> None:
    # A row that is small by chance does not decide: its error came from operands as large as the others'.
    assert read("row", pair([[1e-3], [0.0]], [[1e-9], [1.0]])).value == pytest.approx(1e-3 / math.sqrt(0.5))


def test_only_what_is_finite_in_both_is_compared() -> None:
    candidate = torch.tensor([math.nan, math.inf, 1.5, 1.0])
    oracle = torch.tensor([1.0, math.inf, 1.0, math.nan], dtype=torch.float64)
    seen = Pair.of(candidate, oracle, UNIT)
    assert seen.error.tolist() == [0.0, 0.0, 0.5, 0.0]
    assert seen.oracle.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("measured", "allowed", "within"),
    [(1.0, 1.0, True), (1.1, 1.0, False), (math.nan, 1.0, False), (0.0, math.nan, False), (math.inf, 1e300, False)],
)
def test_nan_is_never_within(measured: float, allowed: float, within: bool) -> None:
    assert Figure("out", "row", measured, allowed, "", gates=True).within is within


def test_floors() -> None:
    assert floor("gain", 100, UNIT) == 2 * UNIT
    assert floor("ulp", 100, UNIT) == 0.5
    assert floor("bias", 900, UNIT) == pytest.approx(0.1)
    assert floor("bias", 0, UNIT) == 1.0
    assert [floor(view, 100, UNIT) for view in ("row", "column", "global")] == [0.0] * 3
