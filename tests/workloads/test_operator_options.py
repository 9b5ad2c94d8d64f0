"""Samples of operators that show their options, and layers and copies that other workloads lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import FORWARD, Planted, failed, passed
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accelcheck.verify.oracle import Store
from accelcheck.workloads import builtin
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.operator_options import Order, features, with_options
from accelcheck.workloads.operator_samples import CalledOperator, database, template


def samples(name: str) -> list[Any]:
    """OpInfo's samples of an operator, and those that its options add."""
    info = database()[name]
    return with_options(info, list(info.sample_inputs("cpu", torch.float32)))


def added(name: str) -> list[Any]:
    """Samples that the options of an operator add."""
    own = list(database()[name].sample_inputs("cpu", torch.float32))
    return samples(name)[len(own) :]


def arguments(name: str) -> list[Any]:
    """Values of all arguments of the added samples besides tensors."""
    given = [value for sample in added(name) for value in (*sample.args, *sample.kwargs.values())]
    return [value for value in given if not isinstance(value, Tensor)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk", False),
        ("sum", True),
        ("nn.functional.interpolate.bilinear", True),
        ("isin", True),
        ("fft.fft", "ortho"),
        ("cdist", "donot_use_mm_for_euclid_dist"),
        ("nn.functional.mse_loss", "sum"),
    ],
)
def test_each_option_is_given_other_values(name: str, value: Any) -> None:
    assert any(other is value or (isinstance(value, str) and other == value) for other in arguments(name))


def test_sizes_of_windows_are_uneven_too() -> None:
    sizes = [value for value in arguments("nn.functional.avg_pool2d") if isinstance(value, tuple)]
    assert (3, 4) in sizes


def test_a_tensor_gives_way_to_a_number() -> None:
    assert any(isinstance(argument, float) for argument in arguments("add"))


def test_samples_come_in_the_order_of_what_they_show_first() -> None:
    info, made = database()["topk"], samples("topk")
    order = Order(info, made, 1, shows=True)
    shown: set[str] = set()
    for place in order:
        assert features(info, made[place]) - shown
        shown |= features(info, made[place])
        order.show(place)
    assert shown == {feature for sample in made for feature in features(info, sample)}


def test_options_have_samples_of_their_own_in_a_bundle() -> None:
    calls = template((CalledOperator("topk", ("float32",), variants=("options",)),), 2).calls
    assert len(calls) > 3
    assert len({call.leaves[1:] for call in calls}) > 3  # the first one is a place among the inputs


class Swapped(TorchFunctionMode):
    """Computes a function of torch otherwise."""

    def __init__(self, function: Any, other: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.other = function, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.other if func is self.function else func)(*args, **(kwargs or {}))


def without_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``fft`` with an option that is lost."""
    plain: Tensor = torch.fft.fft(x, *args[:2], **{key: value for key, value in kwargs.items() if key != "norm"})
    return plain


def reading(x: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    """``copy_`` that writes to what it reads where it converts."""
    with torch._C.DisableTorchFunction():
        x.copy_(source)
        if x.dtype != source.dtype:
            source.reshape(-1)[:1].zero_()
    return x


def planted(function: Any, other: Callable[..., Any]) -> Planted:
    def wrong(program: Program) -> None:
        module = program.module

        def call(*inputs: Tensor) -> Any:
            with Swapped(function, other):
                return module(*inputs)

        program.call = call

    return Planted(wrong)


def spectra() -> Workload:
    bundles = (workload for name, workload in builtin().items() if name.startswith("ops-spectral-options"))
    return next(one for one in bundles if "fft.fft," in one.summary)


@pytest.mark.slow
def test_an_option_that_is_lost_fails(fresh: Store) -> None:
    record = failed(fresh, planted(torch.fft.fft, without_norm), spectra(), FORWARD)
    assert {fault.path.split(" options")[0] for fault in record.faults} == {"out['fft.fft"}


@pytest.mark.slow
def test_a_copy_that_changes_its_source_fails(fresh: Store) -> None:
    assert failed(fresh, planted(Tensor.copy_, reading), builtin()["copies-dtypes"], FORWARD)


@pytest.mark.slow
def test_eager_copies_pass(fresh: Store) -> None:
    passed(fresh, planted(Tensor.copy_, Tensor.copy_), builtin()["copies-dtypes"], FORWARD)


def test_layers_are_judged_one_by_one() -> None:
    layers: Any = builtin()["layers"].problem(1).module
    few = layers.without(frozenset(layers.labels) - {"GRU cell", "aligned, sum"})
    assert set(few(torch.ones(6, 3, 8), torch.zeros(6, 6))) == {"GRU cell", "aligned, sum"}
