"""Functions with known values, whose truth in FP64 is not torch's."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.special
import torch
from fault_harness import FORWARD, Planted, built_in, failed, verdict_of
from torch import Tensor

from accelcheck.core.case import Verdict
from accelcheck.verify.oracle import Store
from accelcheck.verify.rounding import Rounding
from accelcheck.workloads import derivatives, known_values, option_families, special_values
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.derivatives import differences, nested
from accelcheck.workloads.function_parts import KNOWN, Collected, KnownFunction, family, table

WORKLOADS = (*known_values.WORKLOADS, *special_values.WORKLOADS, *derivatives.WORKLOADS)


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_the_truth_stands_in_float64_and_the_function_elsewhere() -> None:
    part = KnownFunction(lambda x: x + 1, double)
    assert part(torch.tensor(3.0)).item() == 4
    assert part(torch.tensor(3.0, dtype=torch.float64)).item() == 6


def test_rounding_errors_of_the_function_are_added_to_the_truth() -> None:
    x = torch.linspace(1, 2, 50, dtype=torch.float64)
    with Rounding("float32", "float32", torch.Generator().manual_seed(1)):
        errors = KnownFunction(lambda x: x * 3 / 7, double)(x) / (2 * x) - 1
    assert 2.0**-28 < float(errors.abs().max()) < 2.0**-22


def test_a_truth_that_the_function_lacks_has_no_rounding_errors() -> None:
    truth = KnownFunction(lambda x: x / 0, lambda _: torch.tensor([0.5, torch.inf]))(torch.ones(2, dtype=torch.float64))
    assert truth.tolist() == [0.5, torch.inf]


def _workload(function: Any, truth: Any) -> Workload:
    def build(parts: Collected) -> None:
        parts.add("part", KnownFunction(function, truth), torch.tensor([0.5, 1.5, 2.5]))

    return family("known-test", "A part.", build, traits=KNOWN)


def test_a_right_function_passes_a_wrong_one_fails_and_a_shared_branch_is_no_excuse(fresh: Store) -> None:
    same = Planted(lambda _: None)
    assert verdict_of(fresh, same, _workload(torch.exp, torch.exp), FORWARD).verdict is Verdict.PASS
    wrong = _workload(lambda x: torch.where(x > 2, torch.nan, x.exp()), torch.exp)  # in FP64 too
    record = failed(fresh, same, replace(wrong, name="known-wrong"), FORWARD)
    assert {fault.path for fault in record.faults} == {"out['part']"}


def test_a_truth_of_another_shape_is_a_fault_of_shape(fresh: Store) -> None:
    wrong = _workload(lambda x: x[:2].round().long(), lambda x: x.round().long())
    record = failed(fresh, Planted(lambda _: None), replace(wrong, name="known-shape"), FORWARD)
    assert {fault.view for fault in record.faults} == {"shape"}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_labels_differ(workload: Workload) -> None:
    labels = built_in()[workload.name].problem(3).module.labels
    assert len(labels) == len(set(labels)) > 5  # type: ignore[arg-type]


# SciPy's name where it is not torch's; None where SciPy has no such function of the same arguments.
SCIPY = {
    "lgamma": "gammaln", "bessel_j0": "j0", "bessel_j1": "j1", "bessel_y0": "y0", "bessel_y1": "y1",
    "digamma": "digamma", "modified_bessel_k0": "k0", "modified_bessel_k1": "k1", "sigmoid": "expit",
}  # fmt: skip


def test_values_are_those_of_scipy() -> None:
    compared = 0
    for name, _, text in table("values"):
        function: Any = getattr(scipy.special, SCIPY.get(name, name), None)
        if function is None or name in {"round", "zeta"}:
            continue
        for point in text.split(";"):
            *arguments, value = map(float, point.split())
            if (name, arguments[0]) in {
                ("lgamma", -math.inf),
                ("xlogy", 0.0),
                ("digamma", 0.0),
                ("bessel_y0", -1.0),
                ("bessel_y1", -1.0),
            }:
                continue
            assert float(function(*arguments)) == pytest.approx(value, rel=1e-14, abs=1e-15, nan_ok=True), (name, point)
            compared += 1
    assert compared > 80


def test_differences_and_nested_derivatives_agree_where_torch_is_right() -> None:
    x = torch.tensor([0.7, 0.5, 0.25], dtype=torch.float64)
    for modes in ("ff", "fr", "rf", "rr", "fff", "rrr"):
        found, truth = nested(torch.sin, modes, x), differences(torch.sin, len(modes), x)
        assert float(found) == pytest.approx(float(truth), rel=1e-8)


def test_a_derivative_of_an_order_that_is_lost_fails() -> None:
    x = torch.tensor([0.7, 0.5, 0.25], dtype=torch.float64)
    lost = nested(lambda x: x.detach() * x * x, "rr", x)
    assert float(lost) != pytest.approx(float(differences(lambda x: x**3, 2, x)), rel=1e-3)


def test_ties_of_quantized_numbers_go_to_the_even_level() -> None:
    levels = known_values._level(-128, 127, 3.0, 4, torch.tensor([1.5, 4.5, -1.5, 7.5, 1e6]))
    assert levels.tolist() == [4, 6, 4, 6, 127]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["special-values", "formats"])
def test_correct_results_of_special_values_and_formats_pass(name: str, fresh: Store) -> None:
    assert (
        verdict_of(fresh, Planted(lambda _: None, keeps_strides=True), built_in()[name], FORWARD).verdict
        is Verdict.PASS
    )


def _changed(label: str, change: Any) -> Any:
    def plant(program: Program) -> None:
        module: Any = program.module
        parts = {name: (function, places) for name, function, places in module.parts}
        function, places = parts[label]
        parts[label] = (lambda *inputs: change(function(*inputs))), places
        module.parts = tuple((name, *entry) for name, entry in parts.items())

    return plant


FAULTS = [
    ("values-windows", "max_pool1d kernel_size=2", torch.nan_to_num),
    ("special-values", "var_mean of an empty column", lambda out: (out[0], out[1].nan_to_num())),
    ("special-values", "argmax over 1", torch.zeros_like),
    ("values-signs", "minimum", torch.abs),
    ("mixed-dtypes", "ldexp of int64 and float16", Tensor.float),
    ("mixed-numbers", "remainder of bfloat16 and 1.7", lambda out: [out[0] + 1, out[1]]),
    ("formats", "channel_shuffle, channels last", Tensor.contiguous),
    ("formats", "index_add", lambda out: out[:1].expand(4, -1)),
    ("formats", "nearest by 1.4, channels last", lambda out: out.flip(-1)),
]


@pytest.mark.slow  # seconds each
@pytest.mark.parametrize(("name", "label", "change"), FAULTS, ids=[f"{name}: {label}" for name, label, _ in FAULTS])
def test_a_planted_fault_is_named(name: str, label: str, change: Any, fresh: Store) -> None:
    record = verdict_of(fresh, Planted(_changed(label, change), keeps_strides=True), built_in()[name], FORWARD)
    assert record.verdict is Verdict.FAIL
    assert f"out[{label!r}" in {fault.path.partition("]")[0] for fault in record.faults}


def test_masks_hide_all_keys_of_a_sample() -> None:
    workload = next(one for one in option_families.WORKLOADS if one.name == "attention-masks")
    assert bool(workload.problem(3).inputs[2].all(1).any())


def test_float32_has_each_eps_of_logit() -> None:
    """Else its rounding shifts all results, which are one number, to one side."""
    options = [float(text.partition("eps=")[2]) for text, _, _ in table("ends") if text.startswith("logit ")]
    assert max(options) > 0.5
    assert options == torch.tensor(options).tolist()
