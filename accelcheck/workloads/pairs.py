"""Operators that compilers join with what follows, and arithmetic that they simplify.

A compiler replaces a product and a sum by one operator, drops a sum with 0, and moves constants together. Each rule has
conditions: options, broadcasting, other users of a result, constants that are only close to 0 or 1, zeros with a sign.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.draw import normal
from accelcheck.workloads.function_parts import KERNELS, Collected, Function, binades, family, sign_of

ROWS, INNER, COLUMNS = 6, 5, 4
PRODUCTS: Mapping[str, tuple[Function, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "mm": (torch.mm, ((ROWS, INNER), (INNER, COLUMNS)), (ROWS, COLUMNS)),
    "mm, transposed": (lambda x, y: x @ y.t(), ((ROWS, INNER), (COLUMNS, INNER)), (ROWS, COLUMNS)),
    "addmm": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0),
        ((COLUMNS,), (ROWS, INNER), (INNER, COLUMNS)), (ROWS, COLUMNS),
    ),
    "bmm": (torch.bmm, ((3, ROWS, INNER), (3, INNER, COLUMNS)), (3, ROWS, COLUMNS)),
    "baddbmm": (
        lambda b, x, y: torch.baddbmm(b, x, y, beta=2.0, alpha=0.5),
        ((3, 1, COLUMNS), (3, ROWS, INNER), (3, INNER, COLUMNS)), (3, ROWS, COLUMNS),
    ),
    "mv": (torch.mv, ((ROWS, INNER), (INNER,)), (ROWS,)),
    "linear": (functional.linear, ((ROWS, INNER), (COLUMNS, INNER), (COLUMNS,)), (ROWS, COLUMNS)),
    "linear, no bias": (functional.linear, ((2, ROWS, INNER), (COLUMNS, INNER)), (2, ROWS, COLUMNS)),
    "convolution": (
        partial(functional.conv2d, padding=1), ((2, 3, ROWS, INNER), (COLUMNS, 3, 3, 3), (COLUMNS,)),
        (2, COLUMNS, ROWS, INNER),
    ),
    "convolution, no bias": (functional.conv1d, ((2, 3, ROWS), (COLUMNS, 3, 3)), (2, COLUMNS, ROWS - 2)),
    "transposed convolution": (
        functional.conv_transpose1d, ((2, 3, ROWS), (3, COLUMNS, 3), (COLUMNS,)), (2, COLUMNS, ROWS + 2),
    ),
    "attention": (
        functional.scaled_dot_product_attention, ((2, ROWS, 8), (2, INNER, 8), (2, INNER, 8)), (2, ROWS, 8),
    ),
}  # fmt: skip
"""Products by name: function, shapes of its arguments, shape of its result."""
FOLLOWING: Mapping[str, Function] = {
    "plus": lambda r, c: r + c,
    "plus, alpha": lambda r, c: torch.add(r, c, alpha=0.25),
    "added, alpha": lambda r, c: torch.add(c, r, alpha=0.25),
    "minus": lambda r, c: r - c,
    "minus, alpha": lambda r, c: torch.sub(r, c, alpha=3.0),
    "subtracted, alpha": lambda r, c: torch.sub(c, r, alpha=3.0),
    "subtracted, rsub": lambda r, c: torch.rsub(r, c, alpha=0.5),
    "a row added, alpha": lambda r, c: torch.add(c[..., :1, :] if c.dim() > 1 else c[:1], r, alpha=0.5),
    "a column added": lambda r, c: r + c[..., :1],
    "a number added, alpha": lambda r, _: torch.add(r, 2.0, alpha=0.5),
    "moving average": lambda r, c: c.clone().mul_(0.9).add_(r, alpha=0.1),
    "in place, plus": lambda r, c: r.clone().add_(c, alpha=2.0),
    "times": lambda r, c: r * c,
    "times a number": lambda r, _: r * 0.3,
    "divided": lambda r, _: r / 3.0,
    "product and sum": lambda r, c: torch.addcmul(c, r, r, value=0.5),
    "quotient and sum": lambda r, c: torch.addcdiv(c, r, c.abs() + 1.0, value=0.5),
    "between": lambda r, c: torch.lerp(c, r, 0.25),
    "used twice": lambda r, c: (r + c, r * 2.0),
    "relu": lambda r, _: r.relu(),
    "plus, relu": lambda r, c: (r + c).relu(),
    "leaky relu": lambda r, _: functional.leaky_relu(r, 0.3),
    "silu": lambda r, _: functional.silu(r),
    "hardtanh": lambda r, _: functional.hardtanh(r, -0.5, 0.75),
    "clamped": lambda r, _: r.clamp(-0.5, 1.5),
    "masked": lambda r, c: r.masked_fill(c > 0, -2.0),
    "transposed": lambda r, c: r.transpose(0, -1) + c.transpose(0, -1),
    "joined": lambda r, c: torch.cat([r, c], -1),
    "reshaped, plus": lambda r, c: (r.reshape(-1) + c.reshape(-1)).reshape(r.shape),
}  # fmt: skip
"""Operators that follow a product ``r``, by name, with another tensor ``c`` of its shape."""


def _sign(x: Tensor) -> Tensor:
    """Signs, of zeros too; that of a NaN means nothing."""
    return sign_of(x.nan_to_num(1.0))


TINY = tuple(sign * 2.0**-power for power in (10, 20, 27, 30, 33, 40, 66, 100) for sign in (1, -1))
NEAR_1 = tuple(1.0 + sign * 2.0**-power for power in (3, 10, 14, 17, 18, 20, 22) for sign in (1, -1))
ALGEBRA: Mapping[str, Function] = {
    "plus 0": lambda x: _sign(x + 0.0),
    "minus 0": lambda x: _sign(x - 0.0),
    "0 minus": lambda x: _sign(0.0 - x),
    "negated twice": lambda x: _sign(x.neg().neg()),
    "times 0": lambda x: x * 0.0,
    "sign of times 0": lambda x: _sign(x * 0.0),
    "times 1, over 1": lambda x: (x * 1.0) / 1.0,
    "times -1": lambda x: _sign(x * -1.0),
    "minus itself": lambda x: x - x,
    "over itself": lambda x: x / x,
    "power 0": lambda x: x**0.0,
    "power 1": lambda x: x**1.0,
    "power -1": lambda x: x**-1.0,
    "power 2": lambda x: x**2.0,
    "power 3": lambda x: x**3.0,
    "power 2, root": lambda x: (x**2.0).sqrt(),
    "root, power 2": lambda x: x.sqrt() ** 2.0,
    "powers of powers": lambda x: (x**2.0) ** 0.5,
    "exponential of logarithm": lambda x: x.log().exp(),
    "logarithm of exponential": lambda x: x.exp().log(),
    "large and small factors": lambda x: x * 2.0**100 * 2.0**-100,
    "small and large factors": lambda x: x * 2.0**-100 * 2.0**100,
    "sums of constants": lambda x: ((x + 0.125) + 0.25) - 0.375,
    "times 3, over 3": lambda x: x * 3.0 / 3.0,
    "over 3, times 3": lambda x: x / 3.0 * 3.0,
    "over 7": lambda x: x / 7.0,
    "1 over, 1 over": lambda x: 1.0 / (1.0 / x),
    "root of reciprocal": lambda x: (1.0 / x).sqrt(),
    "reciprocal of root": lambda x: 1.0 / x.sqrt(),
    "largest with itself": lambda x: torch.maximum(x, x),
    "largest with 0": lambda x: _sign(torch.maximum(x, torch.zeros_like(x))),
    "clamped twice": lambda x: x.clamp(-1.0, 2.0).clamp(-2.0, 1.0),
    "clamped between crossed bounds": lambda x: x.clamp(2.0, 1.0),
    "equal to itself": lambda x: x == x,  # noqa: PLR0124 - NaN is not
    "not less": lambda x: ~(x < 1.0),
    "chosen by itself": lambda x: torch.where(x > 0, x, -x),
    "to integers and back": lambda x: x.nan_to_num().clamp(-1e6, 1e6).to(torch.int32).to(x.dtype),
    "to half and back": lambda x: x.half().to(x.dtype),
    "to bool and back": lambda x: x.bool().to(x.dtype),
    "remainder of 1": lambda x: torch.remainder(x, 1.0),
    "multiply and add": lambda x: x * x + x,
    "difference of squares": lambda x: x * x - 1.0,
    "sum and mean": lambda x: x.sum(-1) - x.mean(-1) * x.shape[-1],
    "mean of square and variance": lambda x: x.var(-1, unbiased=False) + x.mean(-1).square(),
}
"""Arithmetic that seems to be something simpler, by name."""


def _joined(parts: Collected) -> None:
    for name, (product, shapes, shape) in PRODUCTS.items():
        tensors = [normal(parts.generator, *size) for size in (*shapes, shape)]
        for then, following in FOLLOWING.items():
            parts.add(f"{name}: {then}", partial(_followed, product, following), *tensors)


def _followed(product: Function, following: Function, *tensors: Tensor) -> Any:
    return following(product(*tensors[:-1]), tensors[-1])


def _constants(parts: Collected) -> None:
    small = torch.cat([torch.zeros(1, 16), binades(parts.generator, -40, 1)])
    for number in TINY:
        parts.add(f"plus {number:g}", lambda x, number=number: x + number, small)
        parts.add(f"minus {number:g}", lambda x, number=number: x - number, small)
        parts.add(f"{number:g} minus", lambda x, number=number: number - x, small)
        parts.add(f"largest with {number:g}", lambda x, number=number: x.clamp(min=number), small)
        parts.add(f"logarithm plus {number:g}", lambda x, number=number: (x.abs() + abs(number)).log(), small)
        parts.add(f"over {number:g} and more", lambda x, number=number: 1.0 / (x.abs() + abs(number)), small)
        parts.add(f"above {number:g}", lambda x, number=number: x > number, small)
    for number in NEAR_1:
        parts.add(f"times {number!r}", lambda x, number=number: x * number, small)
        parts.add(f"over {number!r}", lambda x, number=number: x / number, small)
        parts.add(f"power {number!r}", lambda x, number=number: x.abs() ** number, small)
        parts.add(f"{number!r} minus", lambda x, number=number: number - x, small)


def _algebra(parts: Collected) -> None:
    rows = binades(parts.generator, -12, 5)
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5] * 2).reshape(1, 16)
    for name, function in ALGEBRA.items():
        parts.add(name, function, rows)
        parts.add(f"{name}, special", function, special)


_RUNTIMES = KERNELS | {"onnxruntime", "openvino"}

WORKLOADS = (
    family("pairs", "Products and what follows them.", _joined, level=3, compiled=2, techniques=KERNELS),
    family("values-constants", "Arithmetic with constants close to 0 and 1.", _constants, techniques=_RUNTIMES),
    family("values-algebra", "Arithmetic that seems to be something simpler.", _algebra, techniques=_RUNTIMES),
)  # fmt: skip
