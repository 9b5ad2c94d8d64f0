"""The operator itself: opcheck, values and gradients. Run ``pytest test_operator.py`` in this folder."""

from __future__ import annotations

import pytest
import torch
from precise_linear import operator
from torch import Tensor

SHAPES = [(4, 3, 5), (17, 33, 2), (1, 1, 1), (0, 3, 2), (5, 0, 3)]
"""N, K, M."""


def operands(n: int, k: int, m: int, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = torch.randn(n, k), torch.randn(m, k), torch.randn(m)
    return tuple(tensor.requires_grad_(grad) for tensor in made)  # type: ignore[return-value]  # three stay three


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_opcheck_finds_nothing(shape: tuple[int, int, int], *, grad: bool) -> None:
    checks = torch.library.opcheck(operator(), operands(*shape, grad=grad))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_the_rounded_exact_ones(shape: tuple[int, int, int]) -> None:
    x, weight, bias = operands(*shape)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(operator()(x, weight, bias), exact.float(), rtol=1.2e-7, atol=1e-12)


def test_operands_need_not_be_contiguous() -> None:
    x, weight, bias = operands(6, 4, 4)
    expected = operator()(x.t().contiguous(), weight[:, :].repeat(1, 2)[:, :6].contiguous(), bias)
    assert torch.equal(operator()(x.t(), weight.repeat(1, 2)[:, :6], bias), expected)


def test_gradients_are_those_of_a_linear_layer() -> None:
    ours, theirs = operands(7, 5, 3, grad=True), operands(7, 5, 3, grad=True)
    gradients = torch.autograd.grad(operator()(*ours).square().sum(), ours)
    expected = torch.autograd.grad(torch.nn.functional.linear(*theirs).square().sum(), theirs)
    torch.testing.assert_close(gradients, expected)


def test_operands_of_another_shape_or_dtype_are_refused() -> None:
    x, weight, bias = operands(4, 3, 5)
    with pytest.raises(RuntimeError, match=r"expected x \(N, K\) and weight \(M, K\)"):
        operator()(x, weight.t().contiguous(), bias)
    with pytest.raises(RuntimeError, match="expected float32, got Double"):
        operator()(x.double(), weight, bias)
