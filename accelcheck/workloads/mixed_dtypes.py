"""Operators of operands of two dtypes, whose results are exact: torch's promotion decides their dtype and value."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelcheck.workloads.function_parts import KNOWN, Collected, Known, family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.workloads.function_parts import Function

BOOL, U8, I8, I32, I64 = torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
PAIRS = (
    (U8, I8), (I8, U8), (U8, I32), (I32, HALF), (I64, HALF), (HALF, I64), (BOOL, HALF), (I8, I64), (BRAIN, SINGLE),
    (SINGLE, BRAIN), (HALF, BRAIN), (BRAIN, HALF), (SINGLE, HALF), (BOOL, U8), (I64, BRAIN), (U8, SINGLE),
)  # fmt: skip
"""Dtypes of the first and the second operand."""
OPERATORS: Mapping[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in """add sub mul div maximum minimum fmax fmin eq lt ge copysign ldexp heaviside remainder fmod
        floor_divide float_power pow logical_and gcd lcm bitwise_or bitwise_left_shift""".split()
    },
    "add, alpha": lambda x, y: torch.add(x, y, alpha=2),
    "where": lambda x, y: torch.where(y > 2, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "cat": lambda x, y: torch.cat((x, y)),
    "isin": torch.isin,
    "masked_fill": lambda x, y: x.masked_fill(x > 2, y[0]),
    "in place": lambda x, y: x.clone().add_(y),
    "dtype of normal": lambda x, y: torch.zeros_like(torch.normal(x, y)),
    "dtype of a distribution": lambda x, y: torch.zeros_like(
        torch.distributions.Normal(x, y, validate_args=False).sample()
    ),
}
NUMBERS = (1.7, 0.1)
"""Numbers that half precision rounds."""
EXACT: Mapping[str, Function] = {
    name: getattr(torch, name) for name in "sub remainder fmod floor_divide div eq lt ge clamp_min add".split()
}


LONG, SHORT = torch.arange(4097.0, 4197.0), torch.arange(1.0, 60.0)
"""Integers that float16 rounds, and more numbers than a search one by one is worth."""


def _of(operator: Function, dtypes: tuple[torch.dtype, torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = operator(x.to(dtypes[0]), y.to(dtypes[1]))
    return result


def _found(dtypes: tuple[torch.dtype, torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    common = torch.promote_types(*dtypes)
    one, other = x.to(dtypes[0]).to(common), y.to(dtypes[1]).to(common)
    return (one[:, None] == other).any(1)


def _number(operator: Function, dtype: torch.dtype, number: float, x: Tensor, y: Tensor) -> list[Tensor]:
    """Results of an operator of multiples of a number, and of that number as Python's and as a tensor."""
    return [operator(x.to(dtype), number), operator(x.to(dtype), y.to(SINGLE).reshape(()))]


def _mixed(parts: Collected) -> None:
    x, y = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 0]), torch.tensor([1.0, 2, 4, 1, 2, 4, 2, 1])
    for name, operator in OPERATORS.items():
        for dtypes in PAIRS:
            label = f"{name} of {dtypes[0]} and {dtypes[1]}".replace("torch.", "")
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                _of(operator, dtypes, x, y)  # some operators refuse some dtypes
                parts.add(label, partial(_of, operator, dtypes), x, y)
    for dtypes in PAIRS:
        label = f"isin of many, {dtypes[0]} and {dtypes[1]}".replace("torch.", "")
        if not {U8, I8, BOOL} & {*dtypes}:
            parts.add(label, Known(partial(_of, torch.isin, dtypes), partial(_found, dtypes)), LONG, SHORT)
    for number in NUMBERS:
        multiples = torch.tensor([1.0, 2, 3, -1, -2, -3, 4]) * number
        for dtype in (HALF, BRAIN):
            for name, operator in EXACT.items():
                label = f"{name} of {dtype} and {number}".replace("torch.", "")
                parts.add(label, partial(_number, operator, dtype, number), multiples, torch.tensor([number]))


WORKLOADS = (
    family(
        "values-mixed",
        "Operators of operands of two dtypes, and of tensors and numbers that their dtype rounds.",
        _mixed,
        traits=KNOWN,
    ),
)
