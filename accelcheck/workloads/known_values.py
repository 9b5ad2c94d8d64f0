"""Functions at points where their values are known in closed form: poles, infinities, zeros and integers.

Torch computes FP64 by the same branches as FP32, so that its oracle shares a wrong branch. Values of special functions
follow from the NIST Digital Library of Mathematical Functions (https://dlmf.nist.gov, chapters 4 to 10, 18 and 25),
those of elementary functions at infinities and signed zeros from annex F of ISO C, where torch names no others.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, special
from torch.nn import functional

from accelcheck.workloads.function_parts import KERNELS, KNOWN, Collected, Known, family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelcheck.workloads.function_parts import Function

INF, NAN = math.inf, math.nan

FILE = Path(__file__).with_name("known_values.txt")
"""Functions with points, a line each: the arguments, and the value last."""
_SPECIAL: Mapping[str, Function] = {
    "trigamma": partial(special.polygamma, 1),
    "polygamma 2": partial(special.polygamma, 2),
    "polygamma 3": partial(special.polygamma, 3),
}


def facts() -> Iterator[tuple[str, Function, list[tuple[float, ...]]]]:
    """Yields name, function and points of each line of `FILE`."""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition(": ")
        function = _SPECIAL.get(name) or getattr(special, name, None) or getattr(torch, name)
        yield name, function, [tuple(map(float, point.split())) for point in text.split(";")]


def fixed(*values: Any) -> Function:
    """Function of anything that gives these values."""
    truths = [torch.tensor(value) for value in values]
    return lambda *_: truths if len(truths) > 1 else truths[0]


LARGE: Mapping[str, tuple[Function, float, float]] = {
    "i0": (torch.i0, 713.0, 6.7051282636709964e307),
    "i1": (special.i1, 713.0, 6.7004245591864022e307),
    "exp": (torch.exp, 709.0, 8.2184074615549722e307),
    "sinh": (torch.sinh, 710.0, 1.1169973830808557e308),
    "cosh": (torch.cosh, -710.0, 1.1169973830808557e308),
    "lgamma": (torch.lgamma, 1e305, 7.0128845336318389e307),
    "asinh": (torch.asinh, 1e300, 691.46867507877365),
    "acosh": (torch.acosh, 1e300, 691.46867507877365),
    "softplus": (functional.softplus, 800.0, 800.0),
    "erfc": (torch.erfc, 26.0, 5.6631924088561428e-296),
    "hypot": (lambda x: torch.hypot(x, x), 1e308, 1.4142135623730950e308),
    "logsumexp": (lambda x: torch.logsumexp(torch.stack((x, x)), 0), 1e3, 1000 + math.log(2)),
}
"""Functions in float64 at an argument near the end of its range, with the value."""


def _parted(function: Function, argument: float, x: Tensor) -> list[Tensor]:
    """Mantissas and exponents of a function in float64."""
    return list(torch.frexp(function(torch.full((), argument, dtype=torch.float64, device=x.device))))


SEARCHED = (0.0, 2.0, 4.0, INF, NAN), (1.0, 3.0, INF, NAN)
"""Numbers to look for, and a sorted sequence: NaN is larger than any number, as in `torch.sort`."""
RANGES: tuple[tuple[float, float, float], ...] = (
    (0, 1.5, 1), (0, 2.5, 1), (0, 3, 1), (-1, 1.5, 1), (5, 1.5, -1), (0, -2.5, -1), (1, 7.5, 2), (0, 0, 1), (0, 0.5, 1)
)  # fmt: skip
"""Starts, ends and steps, for ``ceil((end - start) / step)`` integers."""
DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)


def _ranges(dtype: torch.dtype, bounds: Sequence[tuple[float, float, float]], x: Tensor) -> list[Tensor]:
    return [torch.arange(*bound, dtype=dtype, device=x.device) for bound in bounds]


def _found(edges: Tensor, values: Tensor) -> list[Tensor]:
    return [torch.searchsorted(edges, values), torch.searchsorted(edges, values, right=True)]


_of_rows = torch.func.grad(lambda x: x.prod(-1).sum())
_of_all = torch.func.grad(torch.prod)
PRODUCTS: Mapping[str, Function] = {
    "prod of rows": _of_rows,
    "prod": lambda x: torch.stack([_of_all(row) for row in x]),
    "prod, mapped": torch.func.vmap(_of_all),
}
"""Gradients of the products of rows: the product of the other factors, which naive ones divide by each factor."""
FACTORS = ((0.0, 5.0, 0.0, 1e20, 1e20, 2.0), (0.0, 5.0, 3.0, 1e20, 1e10, 2.0), (7.0, 5.0, 3.0, 1e10, 1e15, 2.0))
"""Rows with two zeros beside an overflow, with one zero, and with none."""


def _others(x: Tensor) -> Tensor:
    return torch.stack([torch.cat((x[:, :k], x[:, k + 1 :]), 1).prod(-1) for k in range(x.shape[1])], 1)


def _facts(parts: Collected) -> None:
    for name, function, points in facts():
        *arguments, values = zip(*points, strict=True)
        parts.add(name, Known(function, fixed(values)), *(torch.tensor(column) for column in arguments))
    x = torch.ones(1)
    for name, (function, argument, value) in LARGE.items():
        mantissa, exponent = math.frexp(value)
        parts.add(f"{name} of {argument:g}", Known(partial(_parted, function, argument), fixed(mantissa, exponent)), x)
    values, edges = map(torch.tensor, SEARCHED)
    left, right = [0, 1, 2, 2, 3], [0, 1, 2, 3, 4]
    parts.add("searchsorted", Known(_found, fixed(left, right)), edges, values)
    buckets = Known(lambda e, v: [torch.bucketize(v, e), torch.bucketize(v, e, right=True)], fixed(left, right))
    parts.add("bucketize", buckets, edges, values)
    for dtype in DTYPES:
        bounds = RANGES if dtype.is_signed else [bound for bound in RANGES if min(bound) >= 0]
        truth = [[start + step * k for k in range(math.ceil((end - start) / step))] for start, end, step in bounds]
        word = str(dtype).removeprefix("torch.")
        parts.add(f"arange, {word}", Known(partial(_ranges, dtype, bounds), fixed(*truth)), x)
    for name, function in PRODUCTS.items():
        parts.add(f"gradient of {name}", Known(function, _others), torch.tensor(FACTORS))


WORKLOADS = (
    family(
        "known-values",
        "Functions at points where their values are known in closed form, such as poles, infinities and integers.",
        _facts,
        techniques=KERNELS,
        traits=KNOWN,
    ),
)
