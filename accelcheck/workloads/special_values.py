"""Operators of NaN, infinities, zeros of both signs and nothing, and of operands of two dtypes.

Results of two dtypes are exact, so that torch's promotion alone decides them.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.draw import normal
from accelcheck.workloads.function_parts import (
    KERNELS,
    KNOWN,
    Collected,
    Function,
    KnownFunction,
    family,
    sign_of,
    table,
)

INF, NAN = math.inf, math.nan
WINDOWS: Mapping[str, Function] = {
    "max_pool2d": lambda x: functional.max_pool2d(x[None], 3, 2),
    "max_pool3d": lambda x: functional.max_pool3d(x[None, None], (1, 2, 3)),
    "scatter_reduce": lambda x: x[0].scatter_reduce(0, torch.arange(19, device=x.device) % 5, x[1], "amax"),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "layer_norm": lambda x: functional.layer_norm(x, (19,)),
    "to bool": lambda x: x.bool(),
}


def _windows(parts: Collected) -> None:
    x = _rows(parts)
    for name, function in (*WINDOWS.items(), *((name, function) for name, function, _ in table("windows"))):
        parts.add(name, function, x)


def _rows(parts: Collected) -> Tensor:
    """Rows of normal numbers: in all but the first, some are NaN or infinite."""
    x = normal(parts.generator, 6, 19)
    x[1, 3], x[2, 17], x[3, 5], x[4, 6], x[4, 9], x[5, 0] = NAN, NAN, INF, INF, -INF, NAN
    return x


def _special(parts: Collected) -> None:
    x = _rows(parts)
    for name, function, _ in table("rows"):
        for dim in (0, 1):
            parts.add(f"{name} over {dim}", partial(function, dim=dim), x)
    for name, function, _ in table("pairs"):
        parts.add(name, lambda x, f=function: f(x, x.roll(1, 1)), x)
    for name, function, _ in table("empty"):
        for label, shape in {"column": (0, 3), "row": (3, 0), "vector": (0,)}.items():
            parts.add(f"{name} of an empty {label}", partial(function, dim=0), torch.zeros(shape))


def _signs(parts: Collected) -> None:
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0] * 5)[:19].repeat(2, 1)
    others = torch.tensor([0.0, 0.0, -0.0, -0.0] * 5)[:19].repeat(2, 1)
    alone = [(name, function, (zeros,)) for name, function, _ in table("signed")]
    pairs = [(name, function, (zeros, others)) for name, function, _ in table("pairs")]
    rows = [(f"{name} of rows", partial(getattr(torch, name), dim=0), (zeros,)) for name in ("sum", "prod", "amax")]
    every: list[tuple[str, Function, tuple[Tensor, ...]]] = [*alone, *pairs, *rows]
    for name, function, tensors in every:
        signs = partial(_signs_of, function)
        parts.add(name, KnownFunction(signs, signs), *tensors)  # without rounding errors, which change signs of zeros


def _signs_of(function: Callable[..., Any], *tensors: Tensor) -> Tensor:
    result: Tensor = function(*tensors)
    return sign_of(result) if result.is_floating_point() else result


BOOL, U8, I8, I32, I64 = torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
DTYPES = (
    (U8, I8), (I8, U8), (U8, I32), (I32, HALF), (I64, HALF), (HALF, I64), (BOOL, HALF), (I8, I64), (BRAIN, SINGLE),
    (SINGLE, BRAIN), (HALF, BRAIN), (BRAIN, HALF), (SINGLE, HALF), (BOOL, U8), (I64, BRAIN), (U8, SINGLE),
)  # fmt: skip
"""Dtypes of the first and the second operand."""
_normal: Any = torch.distributions.Normal
PROMOTED: Mapping[str, Function] = {
    "add, alpha": lambda x, y: torch.add(x, y, alpha=2),
    "where": lambda x, y: torch.where(y > 2, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "cat": lambda x, y: torch.cat((x, y)),
    "in place": lambda x, y: x.clone().add_(y),
    "dtype of normal": lambda x, y: torch.zeros_like(torch.normal(x, y)),
    "dtype of a sample": lambda x, y: torch.zeros_like(_normal(x, y, validate_args=False).sample()),
}
NUMBERS = (1.7, 0.1)
"""Numbers that half precision rounds."""
LONG, SHORT = torch.arange(4097.0, 4197.0), torch.arange(1.0, 60.0)
"""Integers that half precision rounds, and more numbers than are looked for one by one."""


def _of(function: Function, dtypes: tuple[torch.dtype, torch.dtype], x: Tensor, y: Tensor) -> Tensor:
    result: Tensor = function(x.to(dtypes[0]), y.to(dtypes[1]))
    return result


def _equal(x: Tensor, y: Tensor) -> Tensor:
    common = torch.promote_types(x.dtype, y.dtype)
    return (x.to(common)[:, None] == y.to(common)).any(1)


def _number(function: Function, dtype: torch.dtype, number: float, x: Tensor, y: Tensor) -> list[Tensor]:
    """Results for multiples of a number, and that number as Python's and as a tensor without dimensions."""
    return [function(x.to(dtype), number), function(x.to(dtype), y.to(SINGLE).reshape(()))]


def _mixed(parts: Collected) -> None:
    x, y = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 0]), torch.tensor([1.0, 2, 4, 1, 2, 4, 2, 1])
    for name, function in (*PROMOTED.items(), *((name, function) for name, function, _ in table("mixed"))):
        for dtypes in DTYPES:
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                _of(function, dtypes, x, y)  # some operators refuse some dtypes
                parts.add(
                    f"{name} of {dtypes[0]} and {dtypes[1]}".replace("torch.", ""), partial(_of, function, dtypes), x, y
                )
    for dtypes in DTYPES:
        if not {U8, I8, BOOL} & {*dtypes}:
            label = f"isin of many, {dtypes[0]} and {dtypes[1]}".replace("torch.", "")
            parts.add(label, KnownFunction(partial(_of, torch.isin, dtypes), partial(_of, _equal, dtypes)), LONG, SHORT)


def _numbers(parts: Collected) -> None:
    for number in NUMBERS:
        multiples = torch.tensor([1.0, 2, 3, -1, -2, -3, 4]) * number
        for dtype in (HALF, BRAIN):
            for name, function, _ in table("numbers"):
                label = f"{name} of {dtype} and {number}".replace("torch.", "")
                parts.add(label, partial(_number, function, dtype, number), multiples, torch.tensor([number]))


WORKLOADS = (
    family("special-values", "Reductions and comparisons of NaN beside numbers, and of nothing.", _special),
    family("values-windows", "Windows with NaN beside numbers.", _windows),
    family("values-signs", "Signs of zeros that operators give.", _signs, traits=KNOWN),
    family("mixed-dtypes", "Operators of operands of two dtypes.", _mixed,
        traits=KNOWN, techniques=KERNELS, compiled=4),
    family("mixed-numbers", "Half precision beside numbers that it rounds.",
        _numbers, traits=KNOWN, techniques=KERNELS),
)  # fmt: skip
