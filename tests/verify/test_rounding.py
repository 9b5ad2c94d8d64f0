"""The rounding samples explain what eager really does, and touch nothing that cannot round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import torch
from fault_harness import built_in
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.selftest.faults import compute
from accelcheck.selftest.faults.plant import rounded_to
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify import noise, operators, rounding, sequential, terms
from accelcheck.verify.judge import judge, judge_together
from accelcheck.verify.oracle import compute as compute_reference
from accelcheck.verify.oracle_runs import Source
from accelcheck.verify.precision import SLACK, SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.rounding import Rounding
from accelcheck.verify.views import Yardstick, floor
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.draw import by_value

SAMPLES = 6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def sampled(function: Callable[..., Tensor], *inputs: Tensor, precision: str = "float32", seed: int = 0) -> Tensor:
    storage = "float32" if precision == "tf32" else precision
    with torch.no_grad(), Rounding(precision, storage, generator(seed)):
        return function(*(value.clone() for value in inputs))


def chain(x: Tensor) -> Tensor:
    for _ in range(6):
        x = functional.silu(x.sin() * 1.7) + 0.5
    return x


def summed(terms: Tensor, dim: int) -> Tensor:
    """A sum of one term after the other in FP32: as correct as eager's blocks, and the order that errs most."""
    first, *others = terms.float().unbind(dim)
    for term in others:
        first = first + term
    return first


def sequential_softmax(x: Tensor) -> Tensor:
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / summed(weights, -1)[:, None]


def sequential_norm(x: Tensor) -> Tensor:
    centered = x - (summed(x, -1) / x.shape[-1])[:, None]
    return centered / (summed(centered.square(), -1) / x.shape[-1] + 1e-5).sqrt()[:, None]


Function = Callable[..., Tensor]

OPERATIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.mm, ((64, 96), (96, 80))),
    "sum": (lambda x: x.sum(0), ((96, 80),)),
    "mean": (lambda x: (x + 3).mean(-1), ((96, 80),)),
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1), ((2, 8, 9, 9), (16, 8, 3, 3))),
    "batch-norm": (
        lambda x, mean, scale: functional.batch_norm(x, mean, scale.abs() + 0.5, scale, mean),
        ((4, 8, 9, 9), (8,), (8,)),
    ),
    "softmax": (lambda x: x.softmax(-1), ((32, 50),)),
    "layer-norm": (lambda x: functional.layer_norm(x, (48,)), ((32, 48),)),
    "chain": (chain, ((48, 64),)),
}
SEQUENTIAL: dict[str, Function] = {
    "sum": lambda x: summed(x, 0),
    "mean": lambda x: summed(x + 3, -1) / x.shape[-1],
    "softmax": sequential_softmax,
    "layer-norm": sequential_norm,
}
GRANTED_MORE = {"batch-norm", "softmax", "layer-norm", "chain"}
"""Operators that are granted two units in the last place, and in half precision compute in FP32 and round once: 0.14 to
0.21 of what the samples show."""


def error(candidate: Tensor, exact: Tensor) -> float:
    return float((candidate.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_samples_bracket_the_real_error(name: str, precision: str) -> None:
    function, shapes = OPERATIONS[name]
    dtype: torch.dtype = getattr(torch, precision)
    stored = [normal(*shape, seed=index).to(dtype) for index, shape in enumerate(shapes)]
    exact = function(*(value.double() for value in stored))
    own = error(function(*stored), exact)
    if precision == "float32" and name in SEQUENTIAL:
        own = max(own, error(SEQUENTIAL[name](*stored), exact))
    explained = max(
        error(sampled(function, *(value.double() for value in stored), precision=precision, seed=seed), exact)
        for seed in range(SAMPLES)
    )
    least = 0.1 if precision != "float32" and name in GRANTED_MORE else 0.2
    assert least <= own / explained <= 8


@pytest.mark.parametrize("length", [16, 96, 512])
def test_samples_bracket_a_tf32_matmul(length: int) -> None:
    a, b = (normal(*shape).float() for shape in ((64, length), (length, 80)))
    exact = a.double() @ b.double()
    own = error(rounded_to(11, a).double() @ rounded_to(11, b).double(), exact)
    explained = max(
        error(sampled(torch.mm, a.double(), b.double(), precision="tf32", seed=seed), exact) for seed in range(SAMPLES)
    )
    assert 0.2 <= own / explained <= 8


SUMMANDS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "of both signs": lambda k: (normal(48, k), normal(k, 40, seed=1)),
    "of one sign": lambda k: (normal(48, k).abs(), normal(k, 40, seed=1).abs()),
    "with a small mean": lambda k: (normal(48, k) + 0.3, normal(k, 40, seed=1) + 0.3),
    "of many sizes": lambda k: (normal(48, k) * normal(48, k, seed=2).mul_(1.5).exp_(), normal(k, 40, seed=1)),
    "in rows of many sizes": lambda k: (normal(48, k) * 2.0 ** -torch.arange(48)[:, None], normal(k, 40, seed=1)),
    "after a large one": lambda k: (
        torch.cat([torch.full((48, 1), k / 2.0), normal(48, k - 1).double()], 1),
        normal(k, 40, seed=1),
    ),
}
ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forwards": compute.forwards,
    "backwards": compute.reversed_order,
    "at random": lambda a, b: compute.sequential(a, b, torch.randperm(a.shape[1], generator=generator()).tolist()),
    "in blocks": compute.blocked,
    "in a tree": compute.pairwise,
    "in a matrix unit": compute.matrix_unit,
    "by torch": torch.mm,
}
NORMS = ("row", "column", "block", "element", "gain", "tail")


def measured(a: Tensor, b: Tensor) -> tuple[Tensor, Yardstick, dict[str, float]]:
    """A product of FP32 numbers, its yardstick, and the budget that the samples give each view."""
    exact = a.double() @ b.double()
    stick = Yardstick(exact, UNIT_ROUNDOFF["float32"], SMALLEST_SUBNORMAL["float32"])
    seen = [stick.read(sampled(torch.mm, a.double(), b.double(), seed=seed)) for seed in range(SAMPLES)]
    unit = UNIT_ROUNDOFF["float32"]
    return exact, stick, {view: max(SLACK * max(abs(call[view]) for call in seen), floor(view, unit)) for view in NORMS}


@pytest.mark.parametrize("length", [17, 96, 1024])
@pytest.mark.parametrize("summands", SUMMANDS)
def test_an_fp32_sum_in_any_order_is_within_what_the_samples_show(summands: str, length: int) -> None:
    a, b = (operand.float() for operand in SUMMANDS[summands](length))
    _, stick, allowed = measured(a, b)
    for order, product in ORDERS.items():
        reading = stick.read(product(a, b))
        beyond = {view: (reading[view], limit) for view, limit in allowed.items() if abs(reading[view]) > limit}
        assert not beyond, order


@pytest.mark.parametrize(("summands", "bits"), [("of both signs", 16), ("of one sign", 17)])
def test_a_sum_of_4096_terms_that_keeps_too_few_bits_is_beyond_what_the_samples_show(summands: str, bits: int) -> None:
    a, b = (operand.float() for operand in SUMMANDS[summands](4096))
    exact, stick, allowed = measured(a, b)
    reading = stick.read(rounded_to(bits, exact.float()))
    assert all(reading[view] > allowed[view] for view in ("row", "column", "block"))


def test_a_small_sum_errs_by_its_own_terms() -> None:
    # The rows of a product are sums of their own: the rounding of large rows is no excuse for small ones.
    a, b = (operand.float() for operand in SUMMANDS["in rows of many sizes"](256))
    exact = a.double() @ b.double()
    rows = (sampled(torch.mm, a.double(), b.double()) - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(rows.max() / rows.min()) < 2
    assert float(rows.max()) < 2 * (256 / 6) ** 0.5 * UNIT_ROUNDOFF["float32"]


def test_tf32_rounds_nothing_but_products() -> None:
    x = normal(64, 64)
    assert 0 < error(sampled(chain, x, precision="tf32"), chain(x)) < 100 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize(
    "names",
    [
        operators.EXACT,
        operators.CORRECTLY_ROUNDED,
        operators.INEXACT,
        operators.CONTRACTIONS,
        operators.SCATTERS,
        operators.COMPOSED,
        operators.FACTORISED,
        operators.INTERPOLATED,
        operators.MODULI,
        terms._RULES,
        sequential._RULES,
    ],
)
def test_every_listed_operator_exists(names: Collection[str]) -> None:
    assert names
    spaces = [(name.rpartition("::")[0] or "aten", name.rpartition("::")[2].partition(".")[0]) for name in names]
    assert not {name for space, name in spaces if not hasattr(getattr(torch.ops, space), name)}


def test_no_operator_is_both_exact_and_rounded_but_those_that_may_add() -> None:
    assert not operators.EXACT & operators.CORRECTLY_ROUNDED
    assert not operators.INEXACT & (operators.EXACT | operators.CORRECTLY_ROUNDED | operators.SCATTERS)
    assert {"index_put", "index_put_", "put", "put_"} == operators.SCATTERS & operators.EXACT
    assert operators.MODULI <= operators.EXACT


def test_parts_of_complex_results_err_by_the_modulus() -> None:
    x = torch.complex(normal(64), normal(64, seed=1))
    # The imaginary part of a product with the conjugate cancels: it is 0.
    errors = torch.stack([sampled(lambda x: x * x.conj(), x, seed=seed) - x.abs() ** 2 for seed in range(SAMPLES)])
    largest = (errors.imag.abs() / x.abs() ** 2).amax()
    assert UNIT_ROUNDOFF["float32"] / 8 < largest < 8 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize("length", [8, 1000, 4096, 1031, 4103])
@pytest.mark.parametrize("transform", [torch.fft.rfft, torch.fft.fft, torch.fft.irfft])
def test_samples_of_fourier_transforms_explain_eager(transform: Callable[..., Tensor], length: int) -> None:
    x = normal(16, length)
    exact = transform(x)
    eager = (transform(x.float()) - transform(x.float().double())).abs().amax()
    samples = [(sampled(transform, x, seed=seed) - exact).abs().amax() for seed in range(SAMPLES)]
    assert max(samples) / 40 < eager < SLACK * max(samples)


@pytest.mark.parametrize("length", [1031, 2053, 4103])
def test_samples_of_fourier_transforms_explain_the_gain_of_a_constants_peak(length: int) -> None:
    x = (1.0 + torch.rand(400, 1, generator=generator())).expand(400, length)
    exact = torch.fft.rfft(x.double())

    def gain(got: Tensor) -> float:
        return abs(float(((got - exact) / exact)[:, 0].real.mean()))

    largest = max(gain(sampled(torch.fft.rfft, x.double(), seed=seed)) for seed in range(SAMPLES))
    assert gain(torch.fft.rfft(x)) < SLACK * largest < 8 * UNIT_ROUNDOFF["float32"]


@pytest.mark.parametrize("length", [4103, 16411])
def test_samples_of_fourier_transforms_explain_the_images_of_a_constants_peak(length: int) -> None:
    x = torch.full((1, length), 1.7)
    exact = torch.fft.fft(x.double())

    def image(got: Tensor) -> float:
        return float(((got - exact) / exact[0, 0])[:, 1:].abs().amax())

    largest = max(image(sampled(torch.fft.fft, x.double(), seed=seed)) for seed in range(SAMPLES))
    assert image(torch.fft.fft(x)) < SLACK * largest < 8 * UNIT_ROUNDOFF["float32"]


def test_samples_of_fourier_transforms_err_more_where_eager_does_for_large_prime_factors() -> None:
    def size(errors: Tensor, exact: Tensor) -> float:
        return float(errors.abs().square().mean().sqrt() / exact.abs().square().mean().sqrt())

    eager, samples = [], []
    for length in (4103, 4096):
        x = normal(16, length).float()
        exact = torch.fft.fft(x.double())
        eager.append(size(torch.fft.fft(x) - exact, exact))
        samples.append(size(sampled(torch.fft.fft, x.double()) - exact, exact))
    assert samples[0] / samples[1] > 0.8 * eager[0] / eager[1]


def test_samples_of_a_factorisation_explain_eager_where_the_matrix_is_ill_conditioned() -> None:
    x = normal(8, 12, 12) + 3.0
    eager = (x.float().inverse() - x.float().double().inverse()).abs().amax()
    samples = [(sampled(torch.linalg.inv, x, seed=seed) - x.inverse()).abs().amax() for seed in range(SAMPLES)]
    assert max(samples) / 100 < eager < SLACK * max(samples)


def weighted(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return functional.binary_cross_entropy(x, target, weight)


DECOMPOSED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a loss whose weights cancel": (
        weighted,
        (normal(64).sigmoid().float().double(), normal(64, seed=1).sigmoid().float().double(), normal(64, seed=2)),
    ),
    "a logit near one half": (torch.logit, (0.5 + 1e-3 * normal(64).float().double(),)),
    "terms that cancel": (torch.addcmul, (normal(64), -normal(64), torch.full((64,), 1.01, dtype=torch.float64))),
    "a logarithm of exponentials that add up to one": (
        torch.logaddexp,
        (torch.full((64,), -1.0, dtype=torch.float64), torch.full((64,), -0.4586751, dtype=torch.float64)),
    ),
    "a logarithm of powers of two that add up to one": (
        torch.logaddexp2,
        (torch.full((64,), -1.3, dtype=torch.float64), torch.full((64,), -0.7517717, dtype=torch.float64)),
    ),
    "interpolation by cubic polynomials": (
        lambda x: functional.interpolate(x, scale_factor=1.7, mode="bicubic"),
        (normal(2, 3, 8, 8),),
    ),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_samples_of_operators_that_compute_in_steps_explain_eager(name: str) -> None:
    function, inputs = DECOMPOSED[name]
    narrow = [value.float() for value in inputs]
    exact = function(*(value.double() for value in narrow))
    eager = (function(*narrow) - exact).abs()
    samples = torch.stack(
        [(sampled(function, *(value.double() for value in narrow), seed=seed) - exact).abs() for seed in range(SAMPLES)]
    ).amax(0)
    assert bool((eager <= SLACK * samples.amax()).all())
    assert float(samples.amax()) < 100 * UNIT_ROUNDOFF["float32"] * max(1.0, float(exact.abs().amax()))


def test_functions_of_integers_have_samples_where_they_give_numbers_in_floating_point() -> None:
    x = torch.arange(2, 60)
    assert not torch.equal(sampled(torch.sqrt, x), torch.sqrt(x))
    assert torch.equal(sampled(lambda x: x * 3 + x.sum(), x), x * 3 + x.sum())


def test_rounding_to_decimals_rounds_and_rounding_to_integers_does_not() -> None:
    x = normal(64) * 100
    assert not torch.equal(sampled(lambda x: torch.round(x, decimals=3), x), torch.round(x, decimals=3))
    assert torch.equal(sampled(torch.round, x), torch.round(x))


def test_results_that_come_with_statistics_are_perturbed_too() -> None:
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    args = (normal(8, 3, 4), None, None, mean, variance, 0.1, 1e-5)
    norm = torch.ops.aten._batch_norm_with_update.default
    out = norm(*args)
    perturbed = operators.results(norm, out, args, {})
    assert all(any(tensor is changed for changed in perturbed) for tensor in (mean, variance, *out[:3]))


def test_sums_of_nothing_and_of_single_numbers_have_samples() -> None:
    assert sampled(lambda x: x.sum(1), torch.zeros(0, 3, dtype=torch.float64)).shape == (0,)
    assert sampled(lambda x: x.sum(1), torch.zeros(3, 0, dtype=torch.float64)).tolist() == [0.0, 0.0, 0.0]
    assert sampled(lambda x: x.mean(0), torch.ones((), dtype=torch.float64)).shape == ()


@pytest.mark.parametrize("function", [lambda x: x.norm(p=float("inf")), lambda x: x.abs().amax()], ids=["norm", "amax"])
def test_a_norm_of_order_infinity_does_not_round(function: Callable[[Tensor], Tensor]) -> None:
    x = normal(9, 7)
    assert torch.equal(sampled(function, x), function(x))


UNROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "clone": torch.clone,
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(3).values,
    "amax": lambda x: x.amax(-1),
    "gather": lambda x: x.gather(1, torch.arange(8).expand(8, 8)),
    "index-select": lambda x: x.index_select(0, torch.tensor([3, 3, 1])),
    "indexing": lambda x: x[torch.tensor([3, 1]), torch.tensor([0, 7])],
    "assignment": lambda x: x.clone().index_put_((torch.tensor([1, 2]),), torch.zeros(8).to(x)),
    "max-pool": lambda x: functional.max_pool2d(x[None, None], 2),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "clamp": lambda x: x.clamp(-1, 1),
    "tril": torch.tril,
    "repeat": lambda x: x.repeat(2, 1),
}


@pytest.mark.parametrize("name", UNROUNDED)
def test_what_only_moves_or_selects_stays_exact(name: str) -> None:
    x = normal(8, 8)
    assert torch.equal(sampled(UNROUNDED[name], x, precision="bfloat16"), UNROUNDED[name](x))


def test_views_are_left_alone_and_stay_views() -> None:
    x = normal(4, 6)
    with Rounding("bfloat16", "bfloat16", generator()):
        view = x.t()[1:].reshape(-1, 2)[..., 0].unsqueeze(0)
        transposed = x.t()
    assert torch.equal(view, x.t()[1:].reshape(-1, 2)[..., 0].unsqueeze(0))
    assert transposed.data_ptr() == x.data_ptr()


def test_an_operator_in_place_rounds_what_it_writes_and_nothing_it_reads() -> None:
    x, y = normal(8, 8), normal(8, 8, seed=1)
    written, read = x.clone(), y.clone()
    with Rounding("bfloat16", "bfloat16", generator()):
        returned = written.add_(read)
    assert returned is written
    assert torch.equal(read, y)
    assert 0 < error(written, x + y) < 2 * UNIT_ROUNDOFF["bfloat16"]


@pytest.mark.parametrize(
    ("plain", "written"),
    [
        (torch.sinc, Tensor.sinc_),
        (lambda x: torch.polygamma(1, x), lambda x: x.polygamma_(1)),
        (lambda x: x.round(decimals=2), lambda x: x.round_(decimals=2)),
        (lambda x: torch.addmm(x, x, x), lambda x: x.addmm_(x.clone(), x.clone())),
    ],
    ids=["sinc", "polygamma", "round", "addmm"],
)
def test_an_operator_of_several_roundings_errs_in_place_as_it_does_out_of_place(plain: Any, written: Any) -> None:
    x = normal(8, 8)
    with Rounding("float32", "float32", generator()):
        expected = plain(x)
    result = x.clone()
    with Rounding("float32", "float32", generator()):
        returned = written(result)
    assert returned is result
    assert torch.equal(result, expected)
    assert not torch.equal(result, plain(x))


def test_an_output_argument_is_rounded() -> None:
    x, y, out = normal(8, 8), normal(8, 8, seed=1), torch.empty(8, 8, dtype=torch.float64)
    with Rounding("bfloat16", "bfloat16", generator()):
        torch.mul(x, y, out=out)
    assert 0 < error(out, x * y) < 2 * UNIT_ROUNDOFF["bfloat16"]


def test_integers_and_booleans_are_untouched() -> None:
    x = torch.arange(12).reshape(3, 4)
    with Rounding("bfloat16", "bfloat16", generator()):
        total, more, index = x.sum(0), x + 1, normal(5).argsort()
    assert torch.equal(total, x.sum(0))
    assert torch.equal(more, x + 1)
    assert torch.equal(index, normal(5).argsort())


def test_autograd_passes_through() -> None:
    x, weight = normal(8, 16).requires_grad_(), normal(16, 4, seed=1).requires_grad_()
    with Rounding("float32", "float32", generator()):
        torch.tanh(x @ weight).sum().backward()  # type: ignore[no-untyped-call]  # torch annotates it only in part
    assert x.grad is not None
    assert weight.grad is not None
    exact = torch.autograd.grad(torch.tanh(x @ weight).sum(), (x, weight))
    for mine, true in zip((x.grad, weight.grad), exact, strict=True):
        assert 0 < error(mine, true) < 1e-4


def test_the_same_seed_gives_bitwise_the_same_sample_and_another_another() -> None:
    x, y = normal(16, 16), normal(16, 16, seed=1)
    first, same, other = (sampled(lambda a, b: chain(a @ b), x, y, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_global_generator_is_not_drawn_from() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sampled(chain, normal(8, 8))
    assert torch.equal(torch.get_rng_state(), before)


def test_running_statistics_of_batch_norm_are_perturbed() -> None:
    plain, sample = nn.BatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
    x = normal(3, 4, 5, 5) + 1
    plain(x)
    with Rounding("float32", "float32", generator()):
        sample(x)
    for name in ("running_mean", "running_var"):
        assert 0 < error(getattr(sample, name), getattr(plain, name)) < 1e-5
    assert torch.equal(sample.num_batches_tracked, plain.num_batches_tracked)  # type: ignore[arg-type]  # not None


def test_running_statistics_stay_in_evaluation_mode() -> None:
    norm = nn.BatchNorm2d(4).double().eval()
    x = normal(3, 4, 5, 5)
    with torch.no_grad(), Rounding("float32", "float32", generator()):
        out = norm(x)
    assert torch.equal(norm.running_mean, torch.zeros(4).double())  # type: ignore[arg-type]  # as above
    # Every element stands alone: no sum over the batch, no error of one.
    assert error(out, norm(x)) < 8 * UNIT_ROUNDOFF["float32"]


def scatter(source: Tensor, index: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros(6, source.shape[1], dtype=source.dtype)
    return {
        "index_add": zeros.index_add(0, index, source),
        "scatter_add": zeros.scatter_add(0, index[:, None].expand_as(source), source),
        "index_put": zeros.index_put((index,), source, accumulate=True),
        "put": zeros.put(index[:, None] * source.shape[1] + torch.arange(source.shape[1]), source, accumulate=True),
    }


def test_a_scattered_sum_errs_by_the_terms_that_meet() -> None:
    source = normal(6, 40)
    apart, together = torch.arange(6), torch.zeros(6, dtype=torch.long)
    for name, exact in scatter(source, apart).items():
        with Rounding("float32", "float32", generator()):
            alone = scatter(source, apart)[name]
            met = scatter(source, together)[name]
        assert error(alone, exact) <= UNIT_ROUNDOFF["float32"], name
        assert error(met, scatter(source, together)[name]) > UNIT_ROUNDOFF["float32"], name


@pytest.mark.parametrize("length", [33, 1030])
@pytest.mark.parametrize("function", [torch.prod, lambda x, dim: x.cumprod(dim).select(dim, -1)])
def test_a_product_errs_by_the_number_of_its_factors(function: Callable[..., Tensor], length: int) -> None:
    factors = (1 + 0.01 * normal(length, 64)).float()
    exact = function(factors.double(), 0)
    running = factors[0]
    for factor in factors[1:]:
        running = running * factor
    samples = [
        ((sampled(lambda x: function(x, 0), factors.double(), seed=seed) - exact) / exact).abs().amax()
        for seed in range(SAMPLES)
    ]
    eager = float(((running.double() - exact) / exact).abs().amax())
    assert max(samples) / 4 < eager < SLACK * max(samples)


def test_a_product_of_equal_factors_errs_by_the_lanes_that_round_alike() -> None:
    factor = (1 + 0.01 * normal(64)).float()
    exact = factor.double() ** 512
    lane = factor
    for _ in range(15):  # 32 lanes multiply 16 factors each
        lane = lane * factor
    for _ in range(5):
        lane = lane * lane
    eager = float(((lane.double() - exact) / exact).abs().amax())
    for over in (
        lambda x: x.expand(512, 64).prod(0),
        lambda x: torch.stack([x[i].expand(512).prod() for i in range(64)]),
    ):
        samples = [
            ((sampled(over, factor.double(), seed=seed) - exact) / exact).abs().amax() for seed in range(SAMPLES)
        ]
        assert max(samples) / 16 < eager < SLACK * max(samples)


def test_equal_factors_of_one_row_excuse_no_other_row() -> None:
    factors = (1 + 0.01 * normal(2, 512)).float().double()
    factors[0] = factors[0, 0]
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.prod(1),
        lambda x: x.prod(1, keepdim=True)[:, 0],
        lambda x: x.cumprod(1)[:, -1],
    )
    for function in functions:
        exact = function(factors)
        errors = [(sampled(function, factors, seed=seed) / exact - 1).abs() for seed in range(SAMPLES)]
        alike, apart = torch.stack(errors).amax(0).tolist()
        assert apart < 4 * 512**0.5 * UNIT_ROUNDOFF["float32"] < alike


def test_a_product_may_stay_at_the_smallest_number() -> None:
    smallest = 2.0**-149
    factors = torch.full((261,), 0.6685)
    assert float(functools.reduce(torch.mul, factors)) == smallest
    exact = float(factors.double().prod())
    samples = [float(sampled(torch.prod, factors.double(), seed=seed)) for seed in range(SAMPLES)]
    assert max(samples) > smallest / 4 > exact
    assert max(map(abs, samples)) < 4 * smallest
    assert float(sampled(torch.prod, torch.tensor([0.0, 0.3]).double())) == 0


@pytest.mark.parametrize("function", [torch.cumsum, torch.logsumexp])
def test_sums_along_the_first_dimension_err_by_its_length(function: Callable[..., Tensor]) -> None:
    # Of 2,000 terms, and of 2 in the other dimension.
    x = normal(2000, 2)
    errs = [error(sampled(lambda t: function(t, 0), x, seed=seed)[-1:], function(x, 0)[-1:]) for seed in range(SAMPLES)]
    assert max(errs) > 4 * UNIT_ROUNDOFF["float32"]


def test_a_sum_over_one_dimension_errs_by_the_length_of_that_one() -> None:
    x = normal(4, 4000)
    few = max(error(sampled(lambda t: t.sum(0), x, seed=seed), x.sum(0)) for seed in range(SAMPLES))
    assert few < 8 * UNIT_ROUNDOFF["float32"]


def test_zero_stays_zero() -> None:
    empty = torch.zeros(16, 0, dtype=torch.float64), torch.zeros(0, 8, dtype=torch.float64)
    assert torch.equal(sampled(torch.mm, *empty, precision="float16"), torch.zeros(16, 8).double())


@pytest.mark.parametrize("add", [torch.Tensor.coalesce, torch.Tensor.to_dense])
def test_entries_of_one_place_are_added_up_with_the_errors_of_a_sum(add: Any) -> None:
    values = torch.tensor([1000.0, -1000.0] * 8, dtype=torch.float64)

    def summed(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = add(torch.sparse_coo_tensor(torch.zeros(1, len(x), dtype=torch.long), x, (1,))).to_dense()
        return out

    errors = [float(sampled(summed, values, seed=seed).abs()) for seed in range(SAMPLES)]
    assert 1000.0 * 2.0**-24 < max(errors) < 16000.0 * 2.0**-24


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_nearest_rounds_the_entries_of_sparse_tensors(dtype: torch.dtype) -> None:
    x = torch.eye(3, dtype=dtype).to_sparse()
    with rounding.Nearest(torch.float32):
        out = x * 0.1
    narrow = torch.complex64 if dtype.is_complex else torch.float32
    assert torch.equal(out.to_dense(), (0.1 * torch.eye(3, dtype=dtype)).to(narrow).to(dtype))


@pytest.mark.parametrize("by", ["numpy", "chunks", "whole"])
@pytest.mark.parametrize("least", [0.0, 1e-320])
def test_zero_keeps_its_sign(by: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if by != "numpy":
        monkeypatch.setattr(rounding, "SMALL", -1)
    if by == "whole":
        monkeypatch.setattr(noise, "perturb_", lambda *_: False)
    zeros = torch.tensor([0.0, -0.0, 1.0, least], dtype=torch.float64)
    assert sampled(torch.neg, zeros.sqrt() * 1.0)[:2].signbit().tolist() == [True, False]
    assert sampled(lambda x: x * 2.0, zeros)[:2].signbit().tolist() == [False, True]


def test_underflow_never_turns_a_square_negative() -> None:
    tiny = normal(4096) * SMALLEST_SUBNORMAL["float16"] ** 0.5 / 8
    assert bool((sampled(torch.square, tiny, precision="float16") >= 0).all())


def test_infinities_stay_and_become_no_nan() -> None:
    x = torch.tensor([float("inf"), -float("inf"), 1.0], dtype=torch.float64)
    out = sampled(lambda t: t * 2, x)
    assert out[:2].tolist() == [float("inf"), -float("inf")]
    assert bool(out[2].isfinite())


def test_half_precision_is_noisier_by_the_ratio_of_the_units() -> None:
    x, y = normal(64, 64), normal(64, 64, seed=1)
    fine, coarse = (error(sampled(torch.mul, x, y, precision=name), x * y) for name in ("float32", "bfloat16"))
    assert coarse / fine == pytest.approx(UNIT_ROUNDOFF["bfloat16"] / UNIT_ROUNDOFF["float32"], rel=0.1)


def test_operands_are_rounded_where_storage_is_finer_than_arithmetic() -> None:
    x, y = normal(64, 96), normal(96, 64, seed=1)
    exact = x @ y
    stored = error(sampled(torch.mm, x, y, precision="bfloat16"), exact)
    with torch.no_grad(), Rounding("bfloat16", "float32", generator()):
        cast = error(torch.mm(x, y), exact)
    assert cast > 1.2 * stored


def test_another_precision_for_a_while() -> None:
    mode = Rounding("bfloat16", "float32", generator())
    x = normal(64, 64)
    with torch.no_grad(), mode:
        with mode.at("float32"):
            fine = x * 1.1
        coarse = x * 1.1
    assert error(fine, x * 1.1) < 2 * UNIT_ROUNDOFF["float32"] < error(coarse, x * 1.1)


def test_workloads_are_sampled_without_nan() -> None:
    # AdamW takes the root of squares that underflow in float16.
    program = Program.of(built_in()["train-transformer"].problem(1), dtype=torch.float64, seed=1)
    program.steps = 2
    with Rounding("float16", "float16", generator()):
        result = program.run(Mode.TRAIN)
    assert not [path for path, tensor in result.items() if bool(tensor.isnan().any())]


# Small tensors go through NumPy

AWKWARD = {
    "normal": normal(6, 5),
    "zeros among numbers": torch.relu(normal(40, 9)),
    "zeros alone": torch.zeros(7, dtype=torch.float64),
    "below the spacing": normal(50) * 2.0**-150,
    "subnormal in FP64": normal(50) * 2.0**-1060,
    "infinite": torch.tensor([1.0, float("inf"), -float("inf"), 3.0], dtype=torch.float64),
    "NaN": torch.tensor([1.0, float("nan"), 0.0, -2.0], dtype=torch.float64),
    "a single number": torch.tensor(0.3, dtype=torch.float64),
    "near overflow": normal(30) * 1e308,
}


@pytest.mark.parametrize("length", [1, 64, "each"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", AWKWARD)
def test_numpy_perturbs_to_the_bits_that_torch_does(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, length: int | str
) -> None:
    terms = torch.arange(AWKWARD[name].numel()).reshape(AWKWARD[name].shape) if length == "each" else int(length)
    results = []
    for small in (rounding.SMALL, -1):
        monkeypatch.setattr(rounding, "SMALL", small)
        drawn, tensor = generator(3), AWKWARD[name].clone()
        assert rounding._by_numpy(tensor) is (small > 0)
        Rounding(precision, precision, drawn)._perturb_(tensor, 2.0**-20, terms)
        results.append((tensor.view(torch.int64), drawn.get_state()))
    assert all(torch.equal(first, other) for first, other in zip(*results, strict=True))


LARGE = {
    "normal": normal(3, 7, 11, 13),
    "zeros among numbers": torch.relu(normal(3, 7, 11, 13)),
    "channels last": normal(3, 7, 11, 13).to(memory_format=torch.channels_last),
    "subnormal in FP64": torch.cat([normal(900), normal(900) * 2.0**-1060]),
    "infinite and NaN": torch.cat([normal(900), torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0])]),
    "with gaps": normal(60, 60)[:, ::2],
    "narrower": normal(60, 60).float(),
}


@pytest.mark.parametrize("sums", ["none", "shown", "hidden", "each"])
@pytest.mark.parametrize("name", LARGE)
def test_chunks_are_perturbed_to_the_bits_of_whole_ones(monkeypatch: pytest.MonkeyPatch, name: str, sums: str) -> None:
    monkeypatch.setattr(rounding, "SMALL", -1)
    monkeypatch.setattr(noise, "CHUNK", 512)
    value = LARGE[name]
    terms: int | Tensor = torch.arange(value.numel()).reshape(value.shape) if sums == "each" else 64
    squares = normal(*value.shape, seed=2).square() if sums in {"shown", "each"} else None
    results = []
    for chunked in (True, False):
        if not chunked:
            monkeypatch.setattr(noise, "perturb_", lambda *_: False)
            monkeypatch.setattr(noise, "rounded", lambda *_: None)
        drawn, tensor = generator(3), value.clone()
        mode = Rounding("float32", "float32", drawn)
        mode._perturb_(tensor, 2.0**-24, 1 if sums == "none" else terms, squares)
        results.append((tensor, mode._rounded(value, 2.0**-8), drawn.get_state()))
    for first, other in zip(*results, strict=True):
        assert first.stride() == other.stride()
        assert torch.equal(first.isnan(), other.isnan())
        assert torch.equal(first.nan_to_num(), other.nan_to_num())


def test_output_gradients_are_the_same_under_rounding_errors() -> None:
    # They are multiples of 1/64, and rounding would choose other ones: 2^-6 in every gradient, in FP32 too.
    program, out = Program(nn.Identity(), (), seed=3), torch.zeros(200, 50, dtype=torch.float64)
    with Rounding("float32", "float32", generator()):
        within = program.cotangent("out", out)
    assert torch.equal(within, program.cotangent("out", out))


def test_numbers_that_an_emulation_draws_within_are_drawn_by_operators_that_round_too() -> None:
    # `by_value` is called by emulations while `Rounding` is active: drawn in Python, later draws would be others.
    values = torch.linspace(0.1, 1.0, 8, dtype=torch.float64)

    def literal(source: torch.Generator) -> torch.Tensor:
        factor = 2.0**26 * (1.0 + torch.rand((), generator=source, dtype=torch.float64))
        return torch.frexp(values)[0].to(torch.float64).mul_(factor).frac_().abs_().nan_to_num_()

    drawn = []
    for draw in (literal, lambda source: by_value(source, values)):
        source = generator()
        with Rounding("float32", "float32", source):
            drawn.append((draw(source), source.get_state()))
    assert all(map(torch.equal, *drawn))


# What correct implementations do that uniform errors do not show
def verdict(workload: Workload, candidate: Callable[[Problem], Tensor], dtype: str = "float32") -> list[str]:
    """The faults of a result in forward mode, judged by the rounding samples alone."""
    reference = compute_reference(
        Source(workload, Matrix.load().techniques["eager"], 5, dtype, Mode.FORWARD)
    ).without_eager
    result = {"out": candidate(workload.problem(5))}
    return [str(fault) for fault in judge(result, reference).faults]


def of(module: nn.Module, x: Tensor) -> Workload:
    return Workload("one", "One module.", lambda _, __: Problem(module, (x.clone(),)))


class MeanOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_the_mean_of_terms_that_repeat_may_be_summed_one_after_the_other() -> None:
    x = (1.0 + 0.1 * torch.rand(64, 1, generator=generator())).expand(64, 1000).contiguous()

    def one_by_one(problem: Problem) -> Tensor:
        (rows,) = problem.inputs
        return torch.from_numpy(np.add.accumulate(rows.numpy(), axis=1)[:, -1] / np.float32(1000))

    assert not verdict(of(MeanOf(), x), one_by_one)


def test_average_pooling_may_sum_one_after_the_other() -> None:
    x = normal(4, 4, 33, 33).float()

    def one_by_one(problem: Problem) -> Tensor:
        (images,) = problem.inputs
        windows = images.unfold(2, 3, 2).unfold(3, 3, 2).flatten(4).contiguous().numpy()
        return torch.from_numpy(np.add.accumulate(windows, axis=-1)[..., -1] / np.float32(9))

    assert not verdict(of(nn.AvgPool2d(3, 2), x), one_by_one)


def test_the_gradient_of_average_pooling_may_round_each_quotient() -> None:
    images = normal(4, 4, 33, 33)
    workload = Workload("pool", "Pooling.", lambda _, __: Problem(nn.AvgPool2d(3, 2), (images.float(),)))
    reference = compute_reference(
        Source(workload, Matrix.load().techniques["eager"], 5, "float32", Mode.BACKWARD)
    ).without_eager
    result = Program.of(workload.problem(5), seed=5).run(Mode.BACKWARD)
    assert not judge(result, reference).faults


def test_what_rounding_does_on_a_grid_is_no_bias() -> None:
    """All sums of a coarse number and a constant round the same way."""

    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1.6999

    x = (torch.randint(1, 200, (64, 512), generator=generator()) / 256).half().float()
    reference = compute_reference(Source(of(Plus(), x), Matrix.load().techniques["eager"], 5, "float16", Mode.FORWARD))
    result = {"out": (x.half() + 1.6999)}
    readings = judge(result, reference).readings
    assert abs(readings["out"]["bias"]) > 0.1
    assert not judge_together([(readings, reference.without_eager)] * 3).faults


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_samples_of_a_softmax_share_the_error_of_the_sum_in_a_row(name: str) -> None:
    """A sum of 4,097 terms one after the other, in FP32: all of a row errs by the same factor, or addend."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4097, generator=generator)
    powers = (x - x.amax(-1, keepdim=True)).exp()
    total = torch.from_numpy(np.cumsum(powers.numpy(), -1)[:, -1:].copy())  # NumPy's cumsum is sequential
    own = powers / total if name == "softmax" else (x - x.amax(-1, keepdim=True)) - total.log()
    function: Callable[..., Tensor] = getattr(torch, name)
    truth = function(x.double(), -1)

    def common(result: Tensor) -> Tensor:
        """The error of each row that all its elements share."""
        error = result.double() - truth
        return error.mean(-1) if name == "log_softmax" else (error * truth).sum(-1) / truth.square().sum(-1)

    with Rounding("float32", "float32", torch.Generator().manual_seed(2)):
        sample = function(x.double(), -1)
    assert 0.2 * common(sample).std() < common(own).std() < common(sample).std()


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min, -torch.inf])
def test_samples_of_a_log_softmax_do_not_err_by_its_masks(mask: float) -> None:
    x = normal(16, 16)
    x[0, 3] = x[5, 7] = mask
    truth = torch.log_softmax(x, -1)
    with Rounding("float32", "float32", torch.Generator().manual_seed(0)):
        sample = torch.log_softmax(x, -1)
    assert torch.equal(sample.isinf(), x.isinf())
    assert ((sample - truth).abs() <= 2e-6 * truth.abs()).logical_or(x.isinf()).all()


def test_derivatives_within_a_function_are_rounded_too() -> None:
    x = torch.rand(4, dtype=torch.float64)
    with Rounding("float32", "float32", torch.Generator().manual_seed(0)):
        result = torch.func.jvp(lambda t: (t + 2) * t, (x,), (torch.ones_like(x),))[1]
    error = (result - (2 * x + 2)).abs().max()
    assert 0 < error < 1e-6


def test_a_sum_with_an_infinity_has_no_sequential_error() -> None:
    (error,) = sequential.errors(
        "sum", (torch.tensor([[1.0, torch.inf], [1.0, 2.0]], dtype=torch.float64), [1])
    ).values()
    assert error.tolist() == [0.0, 0.0]


MASKED = (normal(12, 8, seed=5) > 0).double()
COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "sum": lambda x: x.sum(),
    "mm": lambda x: x @ x.t(),
    "linear with a bias": lambda x: functional.linear(x, x, x[:, 0]),
    "positions": lambda x: (x.cumsum(0) - 1) * x,
    "in place": lambda x: x.add_(x).mul_(3.0),
    "index_add": lambda x: torch.zeros(2, 8, dtype=x.dtype).index_add(0, torch.arange(12) % 2, x),
    "index_put": lambda x: torch.zeros(4, 8, dtype=x.dtype).index_put((torch.arange(12) % 4,), x, accumulate=True),
    "histc": lambda x: torch.histc(x.cumsum(0) * 0.3, bins=3, min=0.0, max=3.0),
    "trace": lambda x: x[:8].trace(),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "tf32"])
@pytest.mark.parametrize("name", COUNTS)
def test_sums_of_integers_in_range_are_exact(name: str, precision: str) -> None:
    assert torch.equal(sampled(COUNTS[name], MASKED, precision=precision), COUNTS[name](MASKED.clone()))


def test_a_sum_over_no_numbers_has_nothing_to_round() -> None:
    places = torch.zeros(0, dtype=torch.int64)
    assert sampled(lambda x: x.put(places, x, accumulate=True), torch.zeros(0, dtype=torch.float64)).shape == (0,)


@pytest.mark.parametrize(
    ("function", "x", "precision"),
    [
        (lambda x: x.cumsum(0), MASKED * 0.3, "float32"),
        (lambda x: x + 0.3, MASKED, "float32"),
        (lambda x: x.cumsum(0), MASKED * 2.0**22, "float32"),
        (lambda x: x.cumsum(0), MASKED * 30.0, "bfloat16"),
        (lambda x: x @ x.t(), MASKED * 2.0**11 + MASKED, "tf32"),
        (lambda x: x.sum(0), MASKED.index_fill(1, torch.tensor(7), 0.1), "float32"),
        (lambda x: x.mean(0), MASKED, "float32"),
        (
            lambda x: x.sum(0),
            MASKED.index_fill(0, torch.tensor(3), torch.inf).index_fill(1, torch.tensor(5), 0.1),
            "float32",
        ),
    ],
    ids=[
        "fractions",
        "fraction added",
        "out of range",
        "out of range in half",
        "tf32",
        "one of all",
        "mean",
        "infinity",
    ],
)
def test_other_sums_round(function: Callable[[Tensor], Tensor], x: Tensor, precision: str) -> None:
    truth, sample = function(x.clone()), sampled(function, x, precision=precision)
    assert bool((sample[torch.isfinite(truth)] != truth[torch.isfinite(truth)]).any())
