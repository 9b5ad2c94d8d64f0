"""Custom autograd functions of somebody's own model: gradients that are no derivatives show, unless they are meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, observed, passed, verdict_of
from torch import Tensor, nn
from torch.autograd import Function

from accelcheck.checks.remarks import CUSTOM
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.eager import Eager
from accelcheck.verify.oracle import Store
from accelcheck.verify.own_gradients import own_gradients
from accelcheck.workloads.base import Workload
from accelcheck.workloads.own_model import workload_of


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * given[0]


class Wrong(Square):
    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 1.99 * x * given[0]


class OneRow(Square):
    """Its gradient is wrong in one of eight rows."""

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * given[0] * torch.where(torch.arange(len(x)) == 3, 1.01, 1.0)[:, None]


class Rounded(Function):
    """A straight-through estimator, with a context of its own."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return (x * 8).round() / 8

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        return given[0]


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Any:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * given[0], None


class Narrow(Square):
    """Computes in FP32 whatever it is given, as a kernel without FP64 does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.float() ** 2


class Modulus(Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Any:
        ctx.save_for_backward(z)
        return (z * z.conj()).real

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return 2 * z * given[0]


narrow: Any = Narrow.apply
modulus: Any = Modulus.apply


def layers(function: Callable[..., Any], *constants: Any, **more: Any) -> Workload:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            return function(self.layer(x), *constants) + x

    return workload_of(Model(), (torch.randn(8, 6),), name="layers", sizes=[], **more)


@pytest.mark.parametrize("own", [Wrong, OneRow, Reversed])
def test_a_backward_that_is_no_derivative_fails_under_eager(own: Any, fresh: Store) -> None:
    constants = (0.5,) if own is Reversed else ()
    record = failed(fresh, Eager(), layers(own.apply, *constants), BACKWARD)
    (fault,) = record.faults
    assert str(fault).startswith(f"{own.__name__}.backward: gradient: expected the derivative of its forward")
    assert "where finite differences give" in str(fault)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: layers(Square.apply), "Square: right"),
        (lambda: layers(Rounded.apply), "Rounded: an estimate by design"),
        (lambda: layers(lambda x: narrow(x).to(x.dtype)), "Narrow: not checked: it computes in torch.float32"),
        (lambda: layers(Reversed.apply, 0.5, estimators=["Reversed"]), "Reversed: an estimate by design"),
        (lambda: layers(lambda x: modulus(torch.complex(x, x * x))), "Modulus: right"),
    ],
    ids=["right", "straight-through", "narrow", "meant by the owner", "complex, by parts"],
)
def test_records_say_how_custom_functions_compare(model: Callable[[], Workload], expected: str, fresh: Store) -> None:
    assert observed(passed(fresh, Eager(), model(), BACKWARD), CUSTOM) == expected


def test_other_techniques_and_modes_do_not_repeat_it(fresh: Store) -> None:
    assert not observed(verdict_of(fresh, Eager(), layers(Square.apply), FORWARD), CUSTOM)
    passed(fresh, Planted(nothing), layers(Wrong.apply), BACKWARD)


def test_a_checked_function_computes_what_it_did_before() -> None:
    forward = vars(Square)["forward"]
    own_gradients(layers(Square.apply).problem(0))
    own_gradients(layers(Wrong.apply).problem(0))
    assert vars(Square)["forward"].__func__ is forward.__func__
    assert "forward" not in vars(Wrong)
