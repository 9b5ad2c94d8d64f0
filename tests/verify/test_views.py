"""Each view's formula, on values computed by hand; small and large tensors, whole and in chunks, read the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from accelcheck.core.case import Figure
from accelcheck.verify import views
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.views import GATES, SIGNED, VIEWS, Reading, Yardstick, common_floor, floor, ratio

UNIT = 2.0**-8


class Seen:
    """An oracle with an error added, read."""

    def __init__(self, error: object, oracle: object, spacing: float = 0.0) -> None:
        truth = torch.as_tensor(oracle, dtype=torch.float64)
        self.stick = Yardstick(truth, UNIT, spacing)
        self.reading = self.stick.read(truth + torch.as_tensor(error, dtype=torch.float64))

    def __getitem__(self, view: str) -> float:
        return self.reading[view]

    @property
    def relative(self) -> float:
        return self.reading.relative

    def where(self, view: str) -> str:
        return self.stick.where(view, self.reading)


def matrix() -> Seen:
    """Rows have the sizes 5 and 5, columns 3 and the root of 41; all of it the root of 50."""
    return Seen([[0.0, 0.0], [0.6, 0.8]], [[3.0, 4.0], [0.0, 5.0]])


def flat(errors: list[float], oracle: list[float] | None = None, spacing: float = 0.0) -> Seen:
    """Errors in units in the last place of ones, or of other numbers."""
    truth = [1.0] * len(errors) if oracle is None else oracle
    ulps = [max(2 * UNIT * abs(o), spacing) if o else 1.0 for o in truth]
    return Seen([e * ulp for e, ulp in zip(errors, ulps, strict=True)], truth, spacing)


def ones(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)


def test_row_divides_by_its_row_and_the_mean_row() -> None:
    seen = matrix()
    assert seen["row"] == pytest.approx(1.0 / math.sqrt(25.0 + 25.0))
    assert seen.where("row") == "[1, :]"


def test_column_divides_by_its_column_and_the_mean_column() -> None:
    seen = matrix()
    # 0.6 / sqrt(9 + 25) = 0.103, 0.8 / sqrt(41 + 25) = 0.098
    assert seen["column"] == pytest.approx(0.6 / math.sqrt(9.0 + 25.0))
    assert seen.where("column") == "[..., 0]"


def test_relative_is_the_frobenius_error() -> None:
    assert matrix().relative == pytest.approx(1.0 / math.sqrt(50.0))


def test_element_is_the_largest_error_over_the_root_mean_square() -> None:
    assert matrix()["element"] == pytest.approx(0.8 / math.sqrt(50.0 / 4))


@pytest.mark.parametrize("shape", [(50, 60), (300, 600)])
def test_one_wrong_element_is_diluted_in_all_norms_but_its_own(shape: tuple[int, int]) -> None:
    error, oracle = ones(*shape)
    error[7, 31] = 0.5
    seen = Seen(error, oracle)
    assert seen["element"] == pytest.approx(0.5)
    assert seen["block"] == pytest.approx(
        0.5 / math.sqrt(256 + math.prod(shape) / math.prod(-(-n // 16) for n in shape))
    )
    assert seen.relative == pytest.approx(0.5 / math.sqrt(math.prod(shape)))
    assert (seen.where("row"), seen.where("column")) == ("[7, :]", "[..., 31]")


@pytest.mark.parametrize("shape", [(64, 64), (400, 512)])
def test_block_finds_one_tile(shape: tuple[int, int]) -> None:
    error, oracle = ones(*shape)
    error[32:48, 16:32] = 0.5
    seen = Seen(error, oracle)
    assert seen["block"] == pytest.approx(0.5 / math.sqrt(2))
    assert seen.where("block") == "rows 32.., columns 16.."
    assert seen["row"] < seen["block"] / math.sqrt(shape[1] / 16 - 1)


def test_a_tile_at_the_edge_is_as_large_as_what_is_in_it() -> None:
    error, oracle = ones(17, 33)
    error[16, 32] = 0.5
    seen = Seen(error, oracle)
    # A tile of one element, of 2 x 3 tiles.
    assert seen["block"] == pytest.approx(0.5 / math.sqrt(1 + 17 * 33 / 6))
    assert seen.where("block") == "rows 16.., columns 32.."


def test_the_worst_row_of_many_dimensions_is_named_by_all_of_them() -> None:
    error, oracle = ones(2, 3, 4)
    error[1, 2, 3] = 0.5
    seen = Seen(error, oracle)
    assert seen.where("row") == "[1, 2, :]"
    assert seen.where("column") == "[..., 3]"


def test_a_scalar_is_a_row_of_one() -> None:
    seen = Seen(0.02, 2.0)
    assert seen.relative == pytest.approx(0.01)
    assert seen["gain"] == pytest.approx(0.01)
    assert seen["element"] == pytest.approx(0.01)
    # The mean row is the row itself.
    assert seen["row"] == pytest.approx(0.01 / math.sqrt(2))
    assert seen["column"] == pytest.approx(0.01 / math.sqrt(2))
    assert seen.where("row") == ""
    assert [seen[view] for view in ("tail", "bias")] == pytest.approx([0.02 / (2 * UNIT * 2.0)] * 2)


def test_a_vector_is_one_row() -> None:
    seen = Seen([0.0, 0.3], [3.0, 4.0])
    assert seen["row"] == pytest.approx(0.3 / math.sqrt(50.0))
    assert seen.where("row") == ""
    assert seen["column"] == pytest.approx(0.3 / math.sqrt(16.0 + 12.5))
    assert seen.where("column") == "[..., 1]"


def test_a_small_row_is_measured_against_the_mean_row() -> None:
    # A row that is small by chance does not decide: its error came from operands as large as the others'.
    assert Seen([[1e-3], [0.0]], [[1e-9], [1.0]])["row"] == pytest.approx(1e-3 / math.sqrt(0.5))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gain_is_the_part_of_the_error_along_the_oracle_with_its_sign(sign: float) -> None:
    seen = Seen([[0.0, 0.0], [sign * 0.6, sign * 0.8]], [[3.0, 4.0], [0.0, 5.0]])
    assert seen["gain"] == pytest.approx(sign * 0.8 * 5.0 / 50.0)


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_gain_sees_a_common_factor_and_its_direction(factor: float) -> None:
    oracle = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
    assert Yardstick(oracle, UNIT).read(factor * oracle)["gain"] == pytest.approx(factor - 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_bias_is_the_median_error_in_ulp_with_its_sign(sign: float) -> None:
    seen = flat([sign * e for e in (0.3, -0.1, 0.2, 5.0, 0.4)])
    assert seen["bias"] == pytest.approx(sign * 0.3)


def test_bias_is_upward_and_not_outward() -> None:
    # Truncation is outward for neither sign: it shows in `gain`; a constant that was added shows here.
    assert flat([0.5, 0.5, 0.5, 0.5], [1.0, -1.0, 2.0, -2.0])["bias"] == pytest.approx(0.5)
    assert flat([-0.5, 0.5, -0.5, 0.5], [1.0, -1.0, 2.0, -2.0])["gain"] == pytest.approx(-UNIT)


def test_the_signed_views_are_gain_and_bias_and_bias_alone_gates_nothing() -> None:
    assert {"gain", "bias"} == SIGNED
    assert set(VIEWS) - GATES == {"bias"}


def test_bias_is_over_what_is_not_zero() -> None:
    # Errors of 1, 4 and 10 units in the last place; the fourth element has none to be measured in.
    seen = Seen([2 * UNIT * 1.0, 2 * UNIT * 8.0, 2 * UNIT * 40.0, 7.0], [1.0, 2.0, -4.0, 0.0])
    assert abs(seen["bias"]) == pytest.approx(4.0)


def test_an_oracle_of_zeros_has_no_ulp() -> None:
    seen = Seen([1.0, 2.0], [0.0, 0.0])
    assert [seen[view] for view in ("tail", "bias")] == [0.0] * 2
    assert seen.relative == math.inf


@pytest.mark.parametrize(
    ("count", "tail"), [(2000, 1981.0), (1000, 991.0), (100, 92.0), (20, 12.0), (16, 9.0), (5, 3.0)]
)
def test_tail_leaves_one_percent_and_eight_elements_beyond(count: int, tail: float) -> None:
    # Errors of 1 to `count` units: the one that 1 % of them, or 8, or half of the few exceed.
    seen = flat([float(e) for e in range(1, count + 1)])
    assert seen["tail"] == pytest.approx(tail)
    assert seen["bias"] == pytest.approx(count // 2 + 1)


def test_tail_counts_what_is_not_zero() -> None:
    seen = flat([*(float(e) for e in range(1, 101)), *[1e6] * 100], [*[1.0] * 100, *[0.0] * 100])
    assert (seen["tail"], seen["bias"]) == pytest.approx((92.0, 51.0))


def test_a_tail_shows_where_the_middle_does_not() -> None:
    seen = flat([0.1] * 900 + [30.0] * 100)
    assert (seen["tail"], seen["bias"]) == pytest.approx((30.0, 0.1))


def test_no_ulp_is_smaller_than_the_smallest_subnormal() -> None:
    spacing = SMALLEST_SUBNORMAL["float16"]
    tiny = [spacing * n for n in (1.0, 2.0, 3.0)]
    # Half of the spacing off is correct rounding, however small the number: in units of 2 u |o| it would be 64, 32, 21.
    seen = Seen([0.5 * spacing] * 3, tiny, spacing)
    assert seen["bias"] == pytest.approx(0.5)
    assert Seen([0.5 * spacing] * 3, tiny)["bias"] == pytest.approx(0.5 / (2 * UNIT * 2.0))


def test_the_ulp_views_of_a_large_tensor_see_a_share_of_it() -> None:
    error, oracle = ones(600, 1000)
    error += 2 * UNIT * 0.25
    error[::3] = -2 * UNIT * 3.0
    seen = Seen(error, oracle)
    assert seen["tail"] == pytest.approx(3.0)
    assert seen["bias"] == pytest.approx(0.25)


@pytest.mark.parametrize(("rows", "columns"), [(512, 1024), (256, 256), (2048, 512), (4096, 4096)])
@pytest.mark.parametrize("spared", [16, 128])
def test_no_pattern_of_columns_or_rows_hides_from_the_ulp_views(rows: int, columns: int, spared: int) -> None:
    # 1.6 % of the elements, the smallest ones, are flushed to 0: no norm sees that.
    truth = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).bfloat16()
    small = truth.abs() < truth.abs().float().flatten().kthvalue(int(0.016 * truth.numel())).values
    stick = Yardstick(truth.double(), UNIT)
    everywhere = stick.read(truth.masked_fill(small, 0.0))["tail"]
    assert everywhere == pytest.approx(0.5 / UNIT, rel=1e-6)  # the whole number is lost
    for across in (True, False):
        kept = small.clone()
        (kept if across else kept.T)[:, ::spared] = False
        assert stick.read(truth.masked_fill(kept, 0.0))["tail"] == pytest.approx(everywhere, rel=1e-6), across


def test_what_a_cancellation_left_has_no_ulp_of_its_own() -> None:
    # A millionth of the others, and wrong by a thousandth of them: in its own units that would be 1e3 / (2 u).
    seen = flat([0.0] * 20 + [1.0] * 20, [1.0] * 20 + [1e-6] * 20)
    assert seen["tail"] < 0.01


@pytest.mark.parametrize("view", VIEWS)
def test_no_error_is_zero_even_where_the_oracle_is(view: str) -> None:
    assert Seen([[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]])[view] == 0.0
    assert Seen([0.0], [0.0])[view] == 0.0
    zeros = torch.zeros(200, 100, 5, dtype=torch.float64)
    assert Seen(zeros, zeros)[view] == 0.0


@pytest.mark.parametrize("view", ["row", "column", "block", "element"])
@pytest.mark.parametrize("rows", [1, 20_000])
def test_an_error_against_nothing_is_infinite(view: str, rows: int) -> None:
    error = torch.zeros(rows, 2, dtype=torch.float64)
    error[rows // 2, 1] = 1e-30
    assert Seen(error, torch.zeros_like(error))[view] == math.inf


@pytest.mark.parametrize(
    ("error", "size", "expected"), [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (-1.0, 0.0, -math.inf), (1.0, 4.0, 0.25)]
)
def test_ratio(error: float, size: float, expected: float) -> None:
    assert ratio(error, size) == expected


@pytest.mark.parametrize("padding", [0, 10_000])
def test_only_what_is_finite_in_both_is_compared(padding: int) -> None:
    nan, inf = math.nan, math.inf
    candidate = torch.tensor([nan, inf, 1.5, 1.0, *[1.0] * padding])
    oracle = torch.tensor([1.0, inf, 1.0, nan, *[1.0] * padding], dtype=torch.float64)
    reading = Yardstick(oracle, UNIT).read(candidate)
    assert not reading.finite
    # What is not finite in the oracle counts as 0 in its size; what is not in the candidate alone as right.
    assert reading.relative == pytest.approx(0.5 / math.sqrt(2 + padding))
    assert reading["element"] == pytest.approx(0.5 / math.sqrt((2 + padding) / (4 + padding)))
    assert reading["gain"] == pytest.approx(0.5 / (2 + padding))
    assert all(math.isfinite(value) for value in reading.values)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3, 4), (200, 300)])
def test_a_candidate_that_is_not_finite_says_so(shape: tuple[int, int], number: float) -> None:
    _, oracle = ones(*shape)
    stick = Yardstick(oracle, UNIT)
    assert stick.read(oracle.float()).finite
    wrong = oracle.clone()
    wrong[1, 2] = number
    reading = stick.read(wrong)
    assert not reading.finite
    assert reading.values == (0.0,) * len(VIEWS)


def test_numbers_whose_squares_overflow_are_not_taken_for_infinite() -> None:
    oracle = torch.ones(3, 4, dtype=torch.float64)
    reading = Yardstick(oracle, UNIT).read(oracle * 1e200)
    assert reading.finite
    assert reading.relative == math.inf


@pytest.mark.parametrize(
    ("measured", "allowed", "within"),
    [(1.0, 1.0, True), (1.1, 1.0, False), (math.nan, 1.0, False), (0.0, math.nan, False), (math.inf, 1e300, False)],
)
def test_nan_is_never_within(measured: float, allowed: float, within: bool) -> None:
    assert Figure("out", "row", measured, allowed, "", gates=True).within is within


def by_definition(stick: Yardstick, error: Tensor, oracle: Tensor) -> list[float]:
    """The norms of the module's table, each by itself, on whole tensors."""

    def worst(errors: list[Tensor], truths: list[Tensor]) -> float:
        squares = torch.stack([part.square().sum() for part in truths])
        result = torch.stack([part.square().sum() for part in errors])
        return float((result / (squares + squares.mean())).max().sqrt())

    e, o = (tensor.reshape(stick.rows, stick.columns) for tensor in (error, oracle))
    tiles = [[part for band in torch.split(x, 16) for part in torch.split(band, 16, 1)] for x in (e, o)]
    return [
        worst(list(e), list(o)),
        worst(list(e.T), list(o.T)),
        worst(*tiles),
        float(e.abs().max() / o.square().mean().sqrt()),
        float((e * o).sum() / o.square().sum()),
    ]


SHAPES = [
    (),
    (1,),
    (7,),
    (16, 16),
    (17, 33),
    (views.SMALL,),
    (views.SMALL + 1,),
    (64, views.SMALL // 64),
    (65, views.SMALL // 64 + 1),
    (2, 3, 5),
    (5, 7, 33),
    (2, 3, 5, 17),
    (9, 31, 65),
    (1031, 131),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_small_and_large_tensors_share_their_formulas(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    oracle = torch.randn(shape, generator=generator, dtype=torch.float64)
    candidate = oracle + 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    collected = []
    # NumPy; torch in one chunk; torch in chunks of 16 rows or of 1,024 elements, whichever is more.
    for small, chunk in ((2**20, views.CHUNK), (0, 2**20), (0, 2**10)):
        monkeypatch.setattr(views, "SMALL", small)
        monkeypatch.setattr(views, "CHUNK", chunk)
        stick = Yardstick(oracle, UNIT)
        assert stick.small is bool(small)
        collected.append(stick.read(candidate))
    stick = Yardstick(oracle, UNIT)
    expected = by_definition(stick, candidate - oracle, oracle)
    for reading in collected:
        assert list(reading.values[:5]) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert reading.values == pytest.approx(collected[0].values, rel=1e-12, abs=1e-15)
        assert reading.places == collected[0].places


@pytest.mark.parametrize("shape", [(3, views.WIDEST + 2), (views.CHUNK + 2,), (2 * views.WIDEST,)])
def test_what_is_wider_than_the_widest_row_is_folded(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    oracle = torch.randn(shape, generator=generator, dtype=torch.float64)
    error = torch.zeros_like(oracle)
    error.view(-1)[-5] = 3.0
    stick = Yardstick(oracle, UNIT)
    assert stick.rows * stick.columns == oracle.numel()
    assert stick.columns <= views.WIDEST
    reading = stick.read(oracle + error)
    assert reading.relative == pytest.approx(3.0 / float(oracle.norm()), rel=1e-12)
    assert reading["element"] == pytest.approx(3.0 / float(oracle.square().mean().sqrt()), rel=1e-12)
    assert reading.places[0] == (oracle.numel() - 5) // stick.columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(20, 30), (300, 500)])
def test_a_candidate_of_any_dtype_is_measured_in_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    oracle = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rounded = oracle.to(dtype)
    unit = UNIT_ROUNDOFF[str(dtype).removeprefix("torch.")]
    reading = Yardstick(oracle, unit).read(rounded)
    assert reading.relative == pytest.approx(float((rounded.double() - oracle).norm() / oracle.norm()), rel=1e-12)
    # Correct rounding errs by half a unit at most, where a unit is that of the number's binade: up to twice 2 u |o|.
    assert 0.0 < reading["tail"] <= 0.5


def test_a_candidate_may_have_other_strides() -> None:
    oracle = torch.randn(130, 170, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    turned = (oracle + 1e-3).t().contiguous().t()
    stick = Yardstick(oracle, UNIT)
    first, other = stick.read(turned), stick.read(turned.contiguous())
    assert first.values == pytest.approx(other.values, rel=1e-12)
    assert first.places == other.places


LARGE = 2**24


def test_a_large_tensor_is_read_with_little_memory() -> None:
    oracle = torch.ones(2**12, LARGE // 2**12, dtype=torch.float64)
    candidate = torch.ones(2**12, LARGE // 2**12)
    stick = Yardstick(oracle, UNIT)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        stick.read(candidate)
    held = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert 0 < most < 64 * 2**20


def test_floors() -> None:
    assert floor("gain", UNIT) == 2 * UNIT
    assert floor("tail", UNIT) == 0.5
    assert [floor(view, UNIT) for view in ("row", "column", "block", "element", "bias")] == [0.0] * 5


def test_common_floors_are_what_elementary_functions_may_lean() -> None:
    # 2 units in the last place of FP32, 2 * 2 * 2**-24 of the number; in bfloat16 that is 2**-15 units of 2**-7.
    assert common_floor("gain", 2.0**-8) == 2.0**-22
    assert common_floor("bias", 2.0**-8) == 2.0**-15
    assert common_floor("bias", 2.0**-24) == 2.0


def test_a_reading_is_asked_by_view() -> None:
    reading = Reading(tuple(float(n) for n in range(len(VIEWS))), (0, 0, 0), 0.0, finite=True)
    assert {view: reading[view] for view in VIEWS} == dict(zip(VIEWS, range(len(VIEWS)), strict=True))
