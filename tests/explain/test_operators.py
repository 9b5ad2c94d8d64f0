"""Wrong operators, found in FP64 from the very inputs that they had, in chains, in place and in half precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.explain.budgets import OperatorBudgets
from accelcheck.explain.calls import OperatorCall
from accelcheck.explain.holding import NoTruthError
from accelcheck.explain.operators import OperatorTrace, Recompute, together
from accelcheck.explain.places import Places

SEEDS = range(4)
OPERATORS = 12
THIRD = 2


class Chain(nn.Module):
    """Twelve operators one after the other; each magnifies what the ones before err."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(24, 24) / 24**0.5) for _ in range(3))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.mm(x, self.first)
        x = torch.tanh(x)
        x = torch.mul(x, 3.0)
        x = functional.gelu(x)
        x = torch.mm(x, self.second)
        x = self.norm(x)
        x = torch.exp(x)
        x = torch.softmax(x, -1)
        x = torch.mm(x, self.third)
        x = torch.sigmoid(x)
        x = torch.log(x)
        return torch.sum(x, [0])


class Nth(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates the mode only in part
    """Changes the result of one operator, by its number among those that are no views."""

    def __init__(self, number: int, change: Callable[[Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.number, self.change = number, change
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.names.append(func.name().partition(".")[0])
        return self.change(out) if len(self.names) - 1 == self.number else out


def traced(
    run: Callable[[], object], module: nn.Module, *planted: TorchDispatchMode, dtype: str = "float32", most: int = 1
) -> OperatorTrace:
    places = Places()
    mode = Recompute(OperatorBudgets(dtype, dtype), places, most=most)
    with contextlib.ExitStack() as held:
        for item in (*planted, places.followed(module), mode):
            held.enter_context(item)
        run()
    return mode.trace


def passes(module: nn.Module, seed: int, dtype: torch.dtype) -> Callable[[], object]:
    """A forward and backward pass with inputs of a seed."""
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
    weights = torch.arange(24, dtype=dtype) / 8 - 1

    def run() -> object:
        module.zero_grad()
        return module(x).backward(weights)

    return run


def chain(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return Chain().to(dtype)


def larger(out: Any) -> Any:
    """By 1 %: more than any dtype here rounds."""
    return tuple(larger(item) for item in out) if isinstance(out, tuple) else out * 1.01


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_correct_device_no_operator_of_a_chain_is_named(dtype: str, seed: int) -> None:
    kind = getattr(torch, dtype)
    module = chain(seed, kind)
    trace = traced(passes(module, seed, kind), module, dtype=dtype)
    assert trace.culprits == []
    assert trace.judged == len(trace.seen) > 2 * OPERATORS
    assert trace.skipped == {}


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_the_third_of_twelve_operators_is_named(dtype: str, seed: int) -> None:
    kind = getattr(torch, dtype)
    module = chain(seed, kind)
    trace = traced(passes(module, seed, kind), module, Nth(THIRD, larger), dtype=dtype, most=99)
    (culprit,) = trace.culprits  # what follows it has wrong inputs, and is right
    assert (culprit.number, culprit.operator) == (THIRD, "aten::mul.Tensor")
    assert culprit.place.line.startswith("test_operators.py:")
    assert not culprit.place.backward
    assert any(fault.view.startswith("gain") for fault in culprit.faults)


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_the_third_operator_of_a_backward_pass_is_named(dtype: str, seed: int) -> None:
    kind = getattr(torch, dtype)
    module = chain(seed, kind)
    clean = traced(passes(module, seed, kind), module, dtype=dtype)
    backward = [number for number, call in enumerate(clean.seen) if call.place.backward]
    planted = backward[THIRD]
    trace = traced(passes(module, seed, kind), module, Nth(planted, larger), dtype=dtype, most=99)
    (culprit,) = trace.culprits
    assert (culprit.number, culprit.operator) == (planted, clean.seen[planted].operator)
    assert culprit.place.backward
    assert culprit.place.line == clean.seen[planted].place.line
    assert "test_operators.py:" in culprit.place.line


def test_a_fault_of_one_element_is_named_with_its_place() -> None:
    module = chain(0)

    def upset(out: Tensor) -> Tensor:
        out = out.clone()
        out[5, 7] += 1e-3
        return out

    (culprit,) = traced(passes(module, 0, torch.float32), module, Nth(THIRD, upset)).culprits
    assert culprit.number == THIRD
    assert any(fault.place == "[5, :]" for fault in culprit.faults)
    assert [str(tensor) for tensor in culprit.inputs] == ["float32[16, 24], strides [24, 1]"]
    assert culprit.options == "other=3.0"


def test_the_module_of_an_operator_is_named() -> None:
    module = chain(0)
    number = 5
    (culprit,) = traced(passes(module, 0, torch.float32), module, Nth(number, larger)).culprits
    assert (culprit.operator, culprit.place.module) == ("aten::native_layer_norm", "norm")


class InPlace(nn.Module):
    """Operators that write to their operands, one of them with ``out=``."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        y.add_(x)
        y.mul_(1.25)
        z = torch.zeros_like(y)
        torch.addmm(x, y, x, out=z)
        z[:, 1:].sub_(z[:, :-1].clone())
        return z


@pytest.mark.parametrize("seed", SEEDS)
def test_operators_in_place_are_judged_from_what_they_were_given(seed: int) -> None:
    module = InPlace()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        trace = traced(lambda: module(x), module)
    assert trace.culprits == []
    assert trace.judged == len(trace.seen) == 7


def test_a_wrong_operator_in_place_is_named() -> None:
    module = InPlace()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (culprit,) = traced(lambda: module(x), module, Nth(THIRD, lambda out: out.mul_(1.001)), most=99).culprits
    assert (culprit.number, culprit.operator) == (THIRD, "aten::mul_.Tensor")


def test_an_operator_that_does_not_round_must_give_every_bit() -> None:
    module = nn.Identity()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def upset(out: Tensor) -> Tensor:
        out[3, 3] = torch.nextafter(out[3, 3], torch.tensor(9.0))
        return out

    (culprit,) = traced(lambda: x.t().clone(), module, Nth(0, upset)).culprits
    assert culprit.operator == "aten::clone"
    assert "1 of 64 elements differ" in culprit.faults[0].got


def test_a_sum_of_booleans_that_is_a_boolean_is_named() -> None:
    mask = torch.tensor([True, True, False])
    trace = traced(lambda: mask.cumsum(0), nn.Identity(), Nth(0, lambda out: out.bool()))
    (fault,) = trace.culprits[0].faults
    assert (fault.view, fault.expected, fault.got) == ("dtype", "int64", "bool")


def test_equal_values_leave_an_index_free() -> None:
    holder = OperatorBudgets()
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])
    call = OperatorCall(torch.ops.aten.max.dim, (x, 1), {})
    values = torch.tensor([3.0, 2.0])
    assert not holder.find(call, {"out[0]": values, "out[1]": torch.tensor([2, 1])}).faults
    (fault,) = holder.find(call, {"out[0]": values, "out[1]": torch.tensor([0, 1])}).faults
    assert (fault.path, fault.place) == ("out[1]", "[0]")


def test_a_nan_that_fp64_does_not_have_is_named() -> None:
    module = nn.Identity()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    (culprit,) = traced(x.exp, module, Nth(0, lambda out: out.index_fill(0, torch.tensor([1]), torch.nan))).culprits
    assert "NaN pattern" in culprit.faults[0].what


def test_an_overflow_that_the_dtype_cannot_hold_is_right() -> None:
    module = nn.Identity()
    x = torch.full((4, 4), 300.0, dtype=torch.float16)
    assert traced(lambda: x * x, module, dtype="float16").culprits == []


def test_the_last_operator_of_a_forward_pass_keeps_its_place_in_the_backward_pass() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(4, 8)

    def run() -> object:
        out = module(x)
        return out.backward(torch.randn_like(out))  # which is dispatched before the last operator's gradient

    places = {call.place.module for call in traced(run, module).seen if call.place.backward == "AddmmBackward0"}
    assert places == {"0", "1"}


def test_views_and_random_numbers_are_not_computed_again() -> None:
    module = nn.Identity()
    x = torch.randn(4, 4)
    trace = traced(lambda: torch.bernoulli(x.t().abs().clamp(0, 1)), module)
    assert trace.skipped == {("bernoulli", "draws random numbers"): 1}
    assert [call.operator.partition(".")[0] for call in trace.seen] == ["aten::abs", "aten::clamp", "aten::bernoulli"]


def test_an_operator_without_an_fp64_kernel_is_said_to_have_none() -> None:
    x = torch.ones(4, 4, dtype=torch.int8)
    with torch.library._scoped_library("accelcheck_test", "DEF") as library:
        library.define("only_single(Tensor x) -> Tensor")

        def single(x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise NotImplementedError("only_single is not implemented for 'Double'")
            return x + 1.0

        library.impl("only_single", single, "CPU")
        operator = torch.ops.accelcheck_test.only_single.default
        with pytest.raises(NoTruthError, match="not implemented for 'Double'"):
            OperatorBudgets().find(OperatorCall(operator, (x.float(),), {}), {"out": x.float() + 1.0})
        trace = traced(lambda: operator(x.float()), nn.Identity())
        assert [reason for _, reason in trace.skipped] == [
            "FP64 on the CPU raised NotImplementedError: only_single is not implemented for 'Double'"
        ]


def test_errors_that_point_one_way_in_every_draw_are_named() -> None:
    module = nn.Identity()

    def truncated(out: Tensor, exact: Tensor) -> Tensor:
        beyond = out.double().abs() > exact.abs()
        return torch.where(beyond, torch.nextafter(out, torch.zeros_like(out)), out)

    def run(seed: int, *, wrong: bool) -> OperatorTrace:
        a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        exact = a.double() * b.double()
        planted = Nth(0, lambda out: truncated(out, exact) if wrong else out)
        return traced(lambda: a * b, module, planted, dtype="bfloat16")

    assert together([run(seed, wrong=False) for seed in SEEDS]) is None
    culprit = together([run(seed, wrong=True) for seed in SEEDS])
    assert culprit is not None
    assert culprit.operator == "aten::mul.Tensor"
    assert [fault.view for fault in culprit.faults] == ["gain in all draws"]


def test_complex_results_are_not_judged() -> None:
    call = OperatorCall(torch.ops.aten._fft_r2c.default, (torch.randn(16), [0], 0, True), {})
    with pytest.raises(NoTruthError, match="complex results are not judged"):
        OperatorBudgets().find(call, call.results(call.run()))
