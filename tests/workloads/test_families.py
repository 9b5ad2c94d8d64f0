"""Families of operators at the values, sizes, strides and options where kernels branch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import FORWARD, Planted, built_in, failed, verdict_of
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.verify.oracle import Store
from accelcheck.workloads import extents, option_families
from accelcheck.workloads.base import Program, flatten
from accelcheck.workloads.families import CONSUMERS, UNARY, WORKLOADS
from accelcheck.workloads.function_parts import PER_BINADE, Functions, binades, near

NAMES = [
    workload.name
    for workload in (*WORKLOADS, *option_families.WORKLOADS, *extents.WORKLOADS)
    if isinstance(workload.problem(3).module, Functions)
]


@pytest.mark.parametrize("name", NAMES)
def test_labels_differ_and_every_result_is_finite(name: str) -> None:
    problem = built_in()[name].problem(3)
    labels = [label for label, _, _ in problem.module.parts]  # type: ignore[union-attr]
    assert len(labels) == len(set(labels))
    for path, tensor in flatten(problem.module(*problem.inputs)):
        finite = tensor.float().isfinite()
        assert bool(finite.all()), path


def test_binades_are_rows_and_begin_with_powers_of_two() -> None:
    values = binades(torch.Generator().manual_seed(0), -3, 4)
    assert values.shape == (8, PER_BINADE)
    for row, exponent in zip(values, range(-3, 5), strict=True):
        assert bool((row.abs() >= 2.0**exponent).all() and (row.abs() < 2.0 ** (exponent + 1)).all())
        assert float(row[0].abs()) == 2.0**exponent


def test_numbers_near_a_point_come_from_both_sides() -> None:
    values = near(torch.Generator().manual_seed(0), 1.0, 20)
    assert bool((values < 1).any() and (values > 1).any())
    assert 0 < float((values - 1).abs().min()) < 2.0**-18


def test_every_function_is_in_one_workload_of_values() -> None:
    names = itertools.chain.from_iterable(
        workload.make.args[0].keywords["names"]  # type: ignore[attr-defined]
        for workload in WORKLOADS
        if workload.name.startswith("values-unary-") and not workload.name.endswith("half")
    )
    assert sorted(names) == sorted(UNARY)


def changing(label: str, change: Callable[[Any], Any]) -> Callable[[Program], None]:
    """Changes the result of one function."""

    def plant(program: Program) -> None:
        module: Any = program.module
        assert label in {name for name, _, _ in module.parts}
        module.parts = tuple(
            (name, _followed(function, change) if name == label else function, places)
            for name, function, places in module.parts
        )

    return plant


def _followed(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *inputs: change(function(*inputs))


def _last_wrong(out: Tensor) -> Tensor:
    wrong = out.clone()
    wrong.view(-1)[-1] *= 1.001
    return wrong


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("values-unary-1", "abs", lambda out: torch.where(out < 1e-30, -out, out)),
    ("values-unary-2", "log2", lambda out: torch.where(out.abs() < 0.3, out * 1.001, out)),
    ("values-near", "log near 1", lambda out: torch.where(out.abs() < 1e-4, out + 1e-8, out)),
    ("values-near", "signs of zeros", lambda out: [out[0].abs(), *out[1:]]),
    ("values-quotients", "remainder, quotients of 2^28", torch.zeros_like),
    ("values-integers", "int8, sums", lambda out: [out[0].clamp(-100, 100), *out[1:]]),
    ("values-integers", "uint8, quotients", lambda out: [out[0], out[1].to(torch.int8).to(torch.uint8) % 2, *out[2:]]),
    ("values-integers", "int32, full-width quotients", lambda out: [*out[:3], out[3].float().to(torch.int32)]),
    ("values-integers", "int64, powers", lambda out: [*out[:2], out[2].float().to(torch.int64)]),
    ("values-integers", "int8, products", lambda out: [out[0], out[1].clamp(-100, 100), out[2]]),
    ("sizes-elementwise", "exp of 513", _last_wrong),
    ("sizes-rows-1", "sum of 1025", lambda out: out * (1024 / 1025)),
    ("sizes-rows-1", "softmax of 4097", _last_wrong),
    ("sizes-columns-1", "sum of 70001 rows", lambda out: torch.cat([out[:65535], out[65535:] * 0])),
    ("sizes-products", "4 x 257 x 5, depth", lambda out: out * 0.999),
    ("sizes-products", "beta of 0 with NaN", lambda out: out + 0.01),
    ("sizes-batched-products", "many batches", lambda out: torch.cat([out[:512], out[:188]])),
    ("sizes-attention", "129 positions, causal", lambda out: out.roll(1, 2)),
    ("sizes-indices", "brackets of 17", lambda out: out.roll(1, 0)),
    ("sizes-indices", "cross entropy, ignored, mean", lambda out: out * (6 / 9)),
    ("options-convolutions", "conv2d, dilation and stride", _last_wrong),
    ("options-convolutions", "transposed, output padding", lambda out: out.roll(1, -1)),
    ("options-windows", "average pool, ceil and padding", _last_wrong),
    ("options-windows", "bilinear by 1.7, aligned", lambda out: out * 1.001),
    ("layouts", "sum, every other column", lambda out: out.roll(1, 0)),
    ("layouts", "softmax, expanded", _last_wrong),
    ("layouts", "rolled, windows", lambda out: out.roll(1, 0)),
    ("further-options", "depthwise, 2 filters each", lambda out: out.roll(1, 1)),
    ("further-options", "windows of 33 channels", lambda out: [_last_wrong(out[0]), *out[1:]]),
    ("sizes-indices", "topk 33", lambda out: [torch.cat((out[0][:, :16], out[0][:, 16:] * 0), 1), *out[1:]]),
    ("sizes-indices", "nothing by index", lambda out: [out[0] * 0, *out[1:]]),
    ("sizes-many", "linear of rows", lambda out: torch.cat([out[:65536], out[65536:] * 0])),
    ("sizes-axes", "softmax of 1100", lambda out: [_last_wrong(out[0]), out[1]]),
    ("sizes-axes", "flags of 257", lambda out: [out[0].to(torch.int8).long(), *out[1:]]),
    ("dimensions", "along, ones around", lambda out: [out[0].roll(1, 1), *out[1:]]),
    ("dimensions", "copies, seven", lambda out: [*out[:-1], out[-1].flip(1)]),
    ("scalars", "lerp, an element", lambda out: out.roll(1, 0)),
    ("values-neighbours", "order of 2^53", lambda out: [out[0] | True, *out[1:]]),
    ("values-neighbours", "spread about 1000.0", lambda out: [out[0] * 1.001, out[1]]),
    ("random-bounds", "integers below 100", lambda out: [out[0][:-1], *out[1:]]),
    ("random-bounds", "written, column", lambda out: [torch.zeros_like(out[0]), *out[1:]]),
    ("late-writes", "zero, scattered", torch.zeros_like),
    ("late-writes", "rows, joined", lambda out: torch.cat((torch.full_like(out[:1], 3), out[1:]))),
]


@pytest.mark.slow  # a minute
@pytest.mark.parametrize(("name", "label", "change"), FAULTS, ids=[f"{name}: {label}" for name, label, _ in FAULTS])
def test_one_wrong_result_is_named(name: str, label: str, change: Callable[[Any], Any], fresh: Store) -> None:
    record = failed(fresh, Planted(changing(label, change)), built_in()[name], FORWARD)
    assert f"out[{label!r}" in {fault.path.partition("]")[0] for fault in record.faults}


def test_properties_of_random_numbers_hold_for_every_seed() -> None:
    problem = built_in()["random-bounds"].problem(3)
    torch.manual_seed(0)
    first, second = (flatten(problem.module(*problem.inputs)) for _ in range(2))
    for (path, one), (_, other) in zip(first, second, strict=True):
        assert torch.equal(one, other), path


def test_a_gradient_is_asked_of_one_input_alone() -> None:
    problem = built_in()["gradients-alone"].problem(3)
    asked: dict[str, list[int]] = {}
    for label, function, places in problem.module.parts:  # type: ignore[union-attr]
        inputs = [problem.inputs[place].clone().requires_grad_() for place in places]
        function(*inputs).sum().backward()
        asked.setdefault(label.split(",")[0], []).append(*(n for n, x in enumerate(inputs) if x.grad is not None))
    assert {name: list(range(len(shapes))) for name, (_, shapes) in extents.ALONE.items()} == asked


@pytest.mark.slow
def test_a_gradient_that_is_lost_where_no_other_is_asked_fails(fresh: Store) -> None:
    def plant(program: Program) -> None:
        module: Any = program.module
        module.parts = tuple(
            (name, _detached(function) if name == "layer norm, input 1" else function, places)
            for name, function, places in module.parts
        )

    failed(fresh, Planted(plant), built_in()["gradients-alone"], Mode.BACKWARD)


def _detached(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, weight, bias: function(x, weight.detach() + 0 * weight, bias)


@pytest.mark.slow
def test_results_of_what_is_read_after_a_write_fail(fresh: Store) -> None:
    def swapped(read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def late(x: Tensor) -> Tensor:
            write(x)
            return read(x)

        return late

    def plant(program: Program) -> None:
        module: Any = program.module
        module.parts = tuple((name, swapped(*function.args), places) for name, function, places in module.parts)

    record = verdict_of(fresh, Planted(plant), built_in()["late-writes"], FORWARD)
    wrong = {fault.path.partition("]")[0] for fault in record.faults}
    assert {f"out['zero, {consumer}'" for consumer in CONSUMERS} <= wrong
