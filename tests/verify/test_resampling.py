"""Interpolation in the oracle: its definition, and what rounding does to coordinates."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, passed, verdict_of
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Verdict
from accelcheck.explain.budgets import OperatorBudgets
from accelcheck.explain.calls import OperatorCall
from accelcheck.verify.oracle import Store
from accelcheck.verify.resampling import RESAMPLED, Defined, resampled
from accelcheck.verify.rounding import Rounding
from accelcheck.workloads.base import Problem, Program, Workload

MODES = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
FILTERS = [*((mode, False) for mode in MODES), ("bilinear", True), ("bicubic", True)]
UNIT = 2.0**-24


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(x: Tensor, **options: Any) -> Tensor:
    x = x.detach().requires_grad_()
    out = functional.interpolate(x, **options)
    return torch.autograd.grad(out, x, drawn(*out.shape, seed=1).to(x.dtype))[0]


def sizes(mode: str, *, antialiased: bool, number: int) -> tuple[list[int], dict[str, Any]]:
    """Extents of an image from 4 to 40, and options of a random size or scale; at least 2 elements wide."""
    chance = random.Random(f"{mode} {antialiased} {number}")
    dims = MODES[mode]
    extents = [chance.randint(4, 40 // dims) for _ in range(dims)]
    options: dict[str, Any] = {"mode": mode, "align_corners": chance.random() < 0.5}
    if antialiased:
        options["antialias"] = True
    scales = [chance.choice([0.55, 0.6, 1.3, 1.7, 2.0, 3.0]) for _ in extents]
    if chance.random() < 0.5:
        return extents, {**options, "size": [chance.randint(2, 40 // dims) for _ in extents]}
    return extents, {**options, "scale_factor": scales, "recompute_scale_factor": chance.random() < 0.5}


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize(("mode", "antialiased"), FILTERS)
def test_the_definition_is_what_torch_computes(mode: str, number: int, *, antialiased: bool) -> None:
    extents, options = sizes(mode, antialiased=antialiased, number=number)
    x = drawn(2, 3, *extents)
    out, grad = functional.interpolate(x, **options), gradient(x, **options)
    with Defined():
        assert torch.allclose(functional.interpolate(x, **options), out, atol=1e-12)
        assert torch.allclose(gradient(x, **options), grad, atol=1e-12)


@pytest.mark.parametrize(("mode", "antialiased"), FILTERS)
def test_a_scale_that_leaves_a_size_as_it_is_copies_unless_it_is_cubic(mode: str, *, antialiased: bool) -> None:
    x = drawn(2, 3, *[3] * MODES[mode])
    options = {"mode": mode, "scale_factor": 1.3, "recompute_scale_factor": False, "antialias": antialiased}
    out = functional.interpolate(x, **options)  # type: ignore[arg-type]  # of a dict
    assert torch.equal(out, x) == (antialiased or mode != "bicubic")
    with Defined():
        assert torch.allclose(functional.interpolate(x, **options), out, atol=1e-12)  # type: ignore[arg-type]


def test_the_definition_keeps_the_layout_of_the_result() -> None:
    x = drawn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    with Defined():
        assert functional.interpolate(x, scale_factor=1.5, mode="bilinear").is_contiguous(
            memory_format=torch.channels_last
        )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_an_image_one_wide_is_no_row_repeated(mode: str) -> None:
    """torch 2.13 gives every row the value of the first one."""
    x = drawn(1, 2, 5, 1)
    row = functional.interpolate(x.mT, size=(1, 7), mode=mode, antialias=True)
    with Defined():
        assert torch.allclose(functional.interpolate(x, size=(7, 1), mode=mode, antialias=True), row.mT)


def test_operators_that_copy_the_nearest_are_left_alone() -> None:
    assert "upsample_nearest2d" not in RESAMPLED
    assert "_upsample_nearest_exact1d_backward" not in RESAMPLED
    assert "_upsample_bicubic2d_aa_backward" in RESAMPLED
    assert "grid_sampler_2d" not in RESAMPLED


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(("mode", "antialiased"), FILTERS)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_samples_err_as_eager_does(mode: str, number: int, *, antialiased: bool, backward: bool) -> None:
    extents, options = sizes(mode, antialiased=antialiased, number=number)
    run = gradient if backward else functional.interpolate
    x = drawn(1, 2, *extents).float()
    with Defined():
        exact = run(x.double(), **options)

    def error(other: Tensor) -> float:
        return float((other - exact).abs().amax() / exact.abs().amax())

    samples = []
    for seed in range(6):
        with Rounding("float32", "float32", torch.Generator().manual_seed(seed)):
            samples.append(error(run(x.double(), **options)))
    assert error(run(x, **options)) < 2 * max(samples)
    assert max(samples) < 4 * max(extents) * UNIT


def test_coordinates_that_are_exact_do_not_err() -> None:
    x = drawn(1, 1, 300)
    options: dict[str, Any] = {"mode": "linear", "scale_factor": 2.0}
    with Rounding("float32", "float32", torch.Generator().manual_seed(0)):
        sample = functional.interpolate(x, **options)
    assert float((sample - functional.interpolate(x, **options)).abs().amax()) < 8 * UNIT * float(x.abs().amax())


def test_samples_of_one_number_have_the_same_coordinates_in_all_draws() -> None:
    args = (torch.ones(1, 1, 41, dtype=torch.float64).cumsum(-1), [29], False)
    errors = [resampled("upsample_linear1d", args, UNIT, torch.Generator().manual_seed(number)) for number in (0, 0, 1)]
    assert torch.equal(errors[0], errors[1])
    assert not torch.equal(errors[0], errors[2])


def test_errors_of_coordinates_come_from_the_generator_of_constants() -> None:
    x, constants = drawn(1, 1, 41), torch.Generator().manual_seed(3)
    with Rounding("float32", "float32", torch.Generator(), constants):
        functional.interpolate(x, size=29, mode="linear")
    assert not torch.equal(constants.get_state(), torch.Generator().manual_seed(3).get_state())


class Resized(nn.Module):
    """Resizes an image once."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, **self.options)


def resizing(shape: tuple[int, ...], **options: Any) -> Workload:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Resized(options), (torch.randn(*shape, generator=generator),))

    return Workload("resizing", "An image of another size.", make)


TALL = [
    ((1, 2, 78, 5), {"mode": "bicubic", "antialias": True, "size": [30, 23]}),
    ((2, 3, 4, 67), {"mode": "bilinear", "scale_factor": 0.6, "recompute_scale_factor": True}),
    ((1, 2, 61, 45), {"mode": "bilinear", "size": [33, 70], "align_corners": True}),
]


@pytest.mark.parametrize(("place", "mode"), itertools.product(range(len(TALL)), (FORWARD, BACKWARD)))
def test_eager_passes_at_any_extent(place: int, mode: Any, fresh: Store) -> None:
    shape, options = TALL[place]
    passed(fresh, Planted(lambda _: None), resizing(shape, **options), mode)


def test_a_scale_that_is_off_by_a_little_fails(fresh: Store) -> None:
    def plant(program: Program) -> None:
        assert isinstance(program.module, Resized)
        program.module.options = {"mode": "bilinear", "scale_factor": 1.7 * (1 + 1e-5)}

    workload = resizing((1, 2, 20, 20), mode="bilinear", scale_factor=1.7)
    assert verdict_of(fresh, Planted(plant), workload).verdict is Verdict.FAIL


def test_eager_is_wrong_where_an_antialiased_image_is_one_wide(fresh: Store) -> None:
    record = verdict_of(
        fresh, Planted(lambda _: None), resizing((1, 2, 5, 1), mode="bilinear", size=[7, 1], antialias=True)
    )
    assert "eager float32 on the CPU errs" in record.reason


def test_explain_judges_an_antialiased_image_by_the_definition() -> None:
    call = OperatorCall(torch.ops.aten._upsample_bilinear2d_aa.default, (drawn(1, 2, 5, 1).float(), [7, 1], False), {})
    assert OperatorBudgets().find(call, call.results(call.run())).faults
    right = OperatorCall(call.func, (drawn(1, 2, 5, 4).float(), [7, 3], False), {})
    assert not OperatorBudgets().find(right, right.results(right.run())).faults
