"""Second opinions on the oracle see wrong values and derivatives, and nothing where all is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle_opinions as opinions
import pytest
import torch
from torch import Tensor

from accelcheck.workloads.operator_calls import SampleCall
from accelcheck.workloads.operator_samples import FEW, CalledOperator, database, template


class Halved(torch.autograd.Function):
    """The exponential, with half its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0] / 2


class Info:
    def __init__(self, op: Any, ref: Any = None) -> None:
        self.op, self.ref = op, ref

    @staticmethod
    def gradcheck_wrapper(op: Any, *args: Any, **options: Any) -> Any:
        return op(*args, **options)


@pytest.fixture(scope="module")
def sample() -> tuple[SampleCall, list[Tensor]]:
    made = template((CalledOperator("exp", ("float32",)),), FEW)
    call = next(call for call in made.calls if not call.empty)
    return call, [value.double() for value in made.inputs]


def test_a_derivative_that_is_wrong_differs(sample: tuple[SampleCall, list[Tensor]]) -> None:
    call, tensors = sample
    assert opinions.by_differences(call, tensors, Info(torch.exp)) == ""
    assert "derivative" in opinions.by_differences(call, tensors, Info(Halved.apply))


def test_a_kink_and_a_cast_have_no_opinion(sample: tuple[SampleCall, list[Tensor]]) -> None:
    call, tensors = sample
    zeros = [torch.zeros_like(value) for value in tensors]
    assert opinions.by_differences(call, zeros, Info(torch.abs)) == "-"
    assert opinions.by_differences(call, tensors, Info(torch.Tensor.float)) == "-"


def test_a_value_that_is_wrong_differs(sample: tuple[SampleCall, list[Tensor]]) -> None:
    call, tensors = sample
    assert opinions.by_reference(call, tensors, Info(torch.exp, np.exp)) == ""
    other = replace(call, function=torch.expm1)
    assert "NumPy" in opinions.by_reference(other, tensors, Info(torch.expm1, np.exp))
    assert opinions.by_reference(call, tensors, Info(torch.exp)) == "-"


def test_an_operator_has_opinions_on_each_part() -> None:
    assert database()["exp"].ref is not None
    entry: dict[str, Any] = {"family": "unary", "floating": {"gradients": True, "dtypes": ["float32"]}}
    message = list(opinions.opinions("exp", entry))
    assert {kind for kind, _ in message} == {"values", "derivatives"}
    assert {text for _, text in message} <= {"", "-"}
    assert ("values", "") in message


@pytest.mark.parametrize(("name", "status"), [("exp", 1), ("sign", 0)])
def test_a_difference_without_a_reason_fails_the_script(
    name: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opinions, "opinions", lambda *_: iter([("values", "torch has 1, NumPy 2")]))
    assert opinions.main([name]) == status
    out = capsys.readouterr().out
    assert f"{name}: values: torch has 1, NumPy 2" in out
    assert ("no reason" in out) == bool(status)


def test_an_output_without_a_derivative_counts_for_nothing(sample: tuple[SampleCall, list[Tensor]]) -> None:
    call, tensors = sample
    both = Info(lambda x: (x.exp(), x.detach().sin()))
    assert opinions.by_differences(call, tensors, both) == ""
