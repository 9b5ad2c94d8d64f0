"""Families of operators at the values, sizes, strides and options where kernels branch: each workload calls many, in one graph.

A kernel has a path for a whole vector and one for its rest, for a row that fits a block and one that does not, for an argument that is
reduced and one that is not. Sizes lie around powers of 2 for that reason, values in every binade, and each result stands alone, so that a
failure names the function and the size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.problem import Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Function = Callable[..., Any]

SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 129, 256, 257, 513, 1025, 2049, 4097)
"""Sizes below, at and above those of vectors, warps and blocks."""
FEW_SIZES = (1, 3, 8, 17, 33, 64, 129, 257, 1025)
LARGEST = 129
"""Largest product with three sides that are alike."""
PER_BINADE = 16
"""Numbers drawn in each binade: a row of the input, so that the view of rows judges each binade by itself."""
ALL = (-120, 120)
"""Binades of float32, but for those whose reciprocals, or whose products with small integers, are not normal."""


class Applied(nn.Module):
    """Functions of its inputs, as ``{label: result}``.

    Args:
        parts: Label, function and the places of its arguments among the inputs.
    """

    def __init__(self, parts: tuple[tuple[str, Function, tuple[int, ...]], ...]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, *inputs: Tensor) -> dict[str, Any]:
        return {label: function(*(inputs[place] for place in places)) for label, function, places in self.parts}


class _Collected:
    """Parts and inputs of an `Applied`, one after the other."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, Function, tuple[int, ...]]] = []
        self.inputs: list[Tensor] = []

    def add(self, label: str, function: Function, *tensors: Tensor) -> None:
        places = []
        for tensor in tensors:
            place = next((place for place, known in enumerate(self.inputs) if known is tensor), len(self.inputs))
            if place == len(self.inputs):
                self.inputs.append(tensor)
            places.append(place)
        self.parts.append((label, function, tuple(places)))

    def problem(self) -> Problem:
        return Problem(Applied(tuple(self.parts)), tuple(self.inputs))


def binades(generator: torch.Generator, lowest: int, highest: int, *, negative: bool = True) -> Tensor:
    """Numbers of every binade from 2^lowest to below 2^(highest + 1), a row for each: ``(binades, PER_BINADE)``."""
    exponents = torch.arange(lowest, highest + 1)
    values = torch.ldexp(1.0 + torch.rand((len(exponents), PER_BINADE), generator=generator), exponents[:, None])
    values[:, 0] = torch.ldexp(torch.ones(len(exponents)), exponents)  # powers of 2 themselves
    return values * (1.0 - 2.0 * integers(generator, 0, 2, *values.shape)) if negative else values


def near(generator: torch.Generator, point: float, nearest: int, *, sides: tuple[int, ...] = (-1, 1)) -> Tensor:
    """Numbers at distances of 2^-1 to 2^-nearest from a point, a row for each."""
    distances = binades(generator, -nearest, -2, negative=False)
    return torch.cat([point + side * distances for side in sides])


_GROWING = (-120, 5)
"""Binades of arguments of exponentials, which stay below 64."""
UNARY: Mapping[str, tuple[Function, tuple[int, int], bool]] = {
    "abs": (torch.abs, ALL, True),
    "neg": (torch.neg, ALL, True),
    "sign": (torch.sign, ALL, True),
    "relu": (torch.relu, ALL, True),
    "reciprocal": (torch.reciprocal, ALL, True),
    "sqrt": (torch.sqrt, ALL, False),
    "rsqrt": (torch.rsqrt, ALL, False),
    "square": (torch.square, (-60, 60), True),
    "cube": (lambda x: x**3, (-40, 40), True),
    "power of one half": (lambda x: x**0.5, ALL, False),
    "power of -1.5": (lambda x: x**-1.5, (-60, 60), False),
    "log": (torch.log, ALL, False),
    "log2": (torch.log2, ALL, False),
    "log10": (torch.log10, ALL, False),
    "log1p": (torch.log1p, ALL, False),
    "log1p below 0": (lambda x: torch.log1p(-x), (-120, -2), False),
    "exp": (torch.exp, _GROWING, True),
    "exp2": (torch.exp2, _GROWING, True),
    "expm1": (torch.expm1, _GROWING, True),
    "sinh": (torch.sinh, _GROWING, True),
    "cosh": (torch.cosh, _GROWING, True),
    "tanh": (torch.tanh, _GROWING, True),
    "sigmoid": (torch.sigmoid, _GROWING, True),
    "silu": (functional.silu, _GROWING, True),
    "mish": (functional.mish, (-120, 3), True),
    "softplus": (functional.softplus, _GROWING, True),
    "logsigmoid": (functional.logsigmoid, _GROWING, True),
    "elu": (functional.elu, _GROWING, True),
    "selu": (functional.selu, _GROWING, True),
    "gelu": (functional.gelu, (-120, 1), True),
    "gelu by tanh": (partial(functional.gelu, approximate="tanh"), (-120, 1), True),
    "hardswish": (functional.hardswish, (-60, 60), True),
    "hardsigmoid": (functional.hardsigmoid, (-20, 60), True),
    "hardtanh": (functional.hardtanh, ALL, True),
    "leaky relu": (functional.leaky_relu, (-110, 120), True),
    "softsign": (functional.softsign, (-120, 60), True),
    "erf": (torch.erf, (-110, 2), True),
    "erfc": (torch.erfc, (-110, 1), True),
    "sin": (torch.sin, (-120, 12), True),
    "cos": (torch.cos, (-120, 12), True),
    "tan": (torch.tan, (-120, 8), True),
    "asin": (torch.asin, (-120, -2), True),
    "acos": (torch.acos, (-120, -2), True),
    "atan": (torch.atan, ALL, True),
    "asinh": (torch.asinh, (-120, 60), True),
    "acosh": (torch.acosh, (1, 60), False),
    "atanh": (torch.atanh, (-120, -2), True),
    "erfinv": (torch.erfinv, (-110, -2), True),
    "lgamma": (torch.lgamma, (-20, 20), False),
    "digamma": (torch.digamma, (-20, 20), False),
    "floor": (torch.floor, (-20, 26), True),
    "ceil": (torch.ceil, (-20, 26), True),
    "round": (torch.round, (-20, 26), True),
    "trunc": (torch.trunc, (-20, 26), True),
    "to int32": (lambda x: x.to(torch.int32), (-20, 29), True),
    "to int64": (lambda x: x.to(torch.int64), (-20, 61), True),
    "to bool": (lambda x: x.to(torch.bool), ALL, True),
}
"""Function, binades of its argument, and whether that may be negative."""

NEAR: Mapping[str, tuple[Function, float, int, tuple[int, ...]]] = {
    "log near 1": (torch.log, 1.0, 22, (-1, 1)),
    "log2 near 1": (torch.log2, 1.0, 22, (-1, 1)),
    "log10 near 1": (torch.log10, 1.0, 22, (-1, 1)),
    "asin near 1": (torch.asin, 1.0, 22, (-1,)),
    "acos near 1": (torch.acos, 1.0, 22, (-1,)),
    "acos near -1": (torch.acos, -1.0, 22, (1,)),
    "atanh near 1": (torch.atanh, 1.0, 22, (-1,)),
    "acosh near 1": (torch.acosh, 1.0, 22, (1,)),
    "erfinv near 1": (torch.erfinv, 1.0, 16, (-1,)),
    "sigmoid near 0": (torch.sigmoid, 0.0, 22, (-1, 1)),
    "round near a tie": (torch.round, 2.5, 20, (-1, 1)),
    "floor near an integer": (torch.floor, 3.0, 20, (-1, 1)),
    "ceil near an integer": (torch.ceil, -3.0, 20, (-1, 1)),
}


def _unary(generator: torch.Generator, extent: int, *, names: tuple[str, ...], lowest: int, highest: int) -> Problem:
    del extent
    parts = _Collected()
    drawn: dict[tuple[int, int, bool], Tensor] = {}
    for name in names:
        function, (low, high), negative = UNARY[name]
        key = max(low, lowest), min(high, highest), negative
        if key not in drawn:
            drawn[key] = binades(generator, key[0], key[1], negative=negative)
        parts.add(name, function, drawn[key])
    return parts.problem()


def _near(generator: torch.Generator, extent: int) -> Problem:
    del extent
    parts = _Collected()
    for name, (function, point, nearest, sides) in NEAR.items():
        parts.add(name, function, near(generator, point, nearest, sides=sides))
    ties = torch.arange(-33, 33) + 0.5
    parts.add("round of ties", torch.round, ties)
    parts.add(
        "signs of zeros",
        lambda x: [_sign(v) for v in (x.clone(), -x, x.abs(), x.floor(), x.ceil(), x.round(), x.trunc(), x.flip(0))],
        _ZEROS,
    )
    whole = integers(generator, 1, 200, 64).float()
    parts.add(
        "exact quotients", lambda a, b: [torch.floor_divide(a * b, b), torch.remainder(a * b, b)], whole, whole.flip(0)
    )
    return parts.problem()


def _sign(x: Tensor) -> Tensor:
    """1 and -1, also of 0 and -0, which are the same number."""
    return torch.copysign(torch.ones_like(x), x)


_ZEROS = torch.tensor([0.0, -0.0, 0.0, -0.0])

BINARY: Mapping[str, Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "power": lambda a, b: a.abs() ** b.clamp(-3, 3),
    "comparison": lambda a, b: [a < b, a <= b, a > b, a >= b, a == b, a != b],
    "addition of a number": lambda a, b: a + 1.5 - b * 0.25,
}


def _elementwise(generator: torch.Generator, extent: int) -> Problem:
    del extent
    parts = _Collected()
    for size in SIZES:
        a, b = normal(generator, size), normal(generator, size)
        for name in ("add", "mul", "div", "where", "maximum"):
            parts.add(f"{name} of {size}", BINARY[name], a, b)
        parts.add(f"exp of {size}", torch.exp, a)
        parts.add(f"tanh of {size}", torch.tanh, a)
    a, b = normal(generator, 37, 65), normal(generator, 37, 65)
    for name, function in BINARY.items():
        parts.add(name, function, a, b)
    row, column = normal(generator, 65), normal(generator, 37, 1)
    parts.add("broadcast", lambda a, row, column: [a + row, a * column, row - column], a, row, column)
    parts.add("long", lambda x: x * 2.0 + 1.0, normal(generator, 70001))
    return parts.problem()


def _large_quotients(generator: torch.Generator, extent: int) -> Problem:
    """Remainders and quotients where the quotient has up to 24 bits and more, of both signs."""
    del extent
    parts = _Collected()
    b = binades(generator, -8, 8)
    for shift in (0, 4, 12, 20, 28):
        a = torch.ldexp(b.flip(1) * (1.0 + torch.rand(b.shape, generator=generator)), torch.tensor(shift))
        parts.add(f"remainder, quotients of 2^{shift}", torch.remainder, a, b)
        parts.add(f"fmod, quotients of 2^{shift}", torch.fmod, a, b)
    return parts.problem()


ROWS: Mapping[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "var": lambda x: x.var(-1, correction=0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: functional.rms_norm(x, x.shape[-1:], eps=1e-6),
    "amax": lambda x: [x.amax(-1), x.amin(-1)],
    "argmax": lambda x: [x.argmax(-1), x.argmin(-1)],
    "max": lambda x: x.max(-1),
    "sort": lambda x: x.sort(-1).values,
    "sort, descending": lambda x: x.sort(-1, descending=True).values,
    "topk": lambda x: x.topk(min(5, x.shape[-1]), -1).values,
    "median": lambda x: x.median(-1).values,
    "cummax": lambda x: x.cummax(-1).values,
    "any and all": lambda x: [(x > 0).any(-1), (x > -3).all(-1), (x > 0).sum(-1)],
    "flip and roll": lambda x: [x.flip(-1), x.roll(3, -1)],
    "triangles": lambda x: [x.tril(1), x.triu(-1)],
}


def _rows(generator: torch.Generator, extent: int, *, names: tuple[str, ...], across: bool) -> Problem:
    """Rows of each size: along them or, turned, across them."""
    del extent
    parts = _Collected()
    for size in SIZES:
        x = normal(generator, size, 3) if across else normal(generator, 3, size)
        for name in names:
            function = ROWS[name]
            if size > 2 or name not in {"var", "layer norm"}:  # which are 0, or 1 and -1, whatever there is
                parts.add(f"{name} of {size}", _turned(function) if across else function, x)
    many = normal(generator, 4, 70001) if across else normal(generator, 70001, 4)
    for name in names[:1]:
        parts.add(f"{name} of 70001 rows", _turned(ROWS[name]) if across else ROWS[name], many)
    return parts.problem()


def _turned(function: Function) -> Function:
    return lambda x: function(x.transpose(0, 1))


def _products(generator: torch.Generator, extent: int, *, batched: bool) -> Problem:
    """Matrix products with one side of each size, and the others small."""
    del extent
    parts = _Collected()
    lead = (3,) if batched else ()
    for size in SIZES:
        for name, (rows, depth, columns) in {
            "rows": (size, 7, 5),
            "depth": (4, size, 5),
            "columns": (4, 7, size),
            "all": (size, size, size),
        }.items():
            if name == "all" and size > LARGEST:
                continue
            a, b = normal(generator, *lead, rows, depth), normal(generator, *lead, depth, columns)
            parts.add(f"{rows} x {depth} x {columns}, {name}", torch.matmul, a, b)
        if not batched:
            a, b = normal(generator, size, 9), normal(generator, 9)
            parts.add(f"vector {size}", torch.mv, a, b)
            parts.add(f"turned {size}", lambda a, b: a.t() @ b, normal(generator, size, 6), normal(generator, size, 4))
            parts.add(
                f"linear {size}",
                functional.linear,
                normal(generator, 3, size),
                normal(generator, 5, size),
                normal(generator, 5),
            )
    if batched:
        parts.add("many batches", torch.bmm, normal(generator, 700, 3, 4), normal(generator, 700, 4, 2))
        parts.add("broadcast batch", torch.matmul, normal(generator, 1, 5, 6), normal(generator, 4, 6, 3))
    else:
        nan = torch.full((4, 5), torch.nan)
        product = normal(generator, 4, 6), normal(generator, 6, 5)
        parts.add("beta of 0 with NaN", lambda c, a, b: torch.addmm(c, a, b, beta=0), nan, *product)
        parts.add(
            "beta and alpha",
            lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2.0),
            normal(generator, 4, 5),
            *product,
        )
        parts.add("outer", torch.outer, normal(generator, 33), normal(generator, 65))
    return parts.problem()


LAYOUTS: Mapping[str, Function] = {
    "transposed": lambda x: x.transpose(-1, -2),
    "every other column": lambda x: x[..., ::2],
    "every third row": lambda x: x[..., ::3, :],
    "offset": lambda x: x[..., 1:, 3:],
    "column": lambda x: x[..., 2],
    "expanded": lambda x: x[..., :1, :].expand(x.shape),
    "windows": lambda x: x.unfold(-1, 4, 3),
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1),
    "permuted": lambda x: x.reshape(x.shape[0], 2, -1).permute(2, 0, 1),
    "reversed": lambda x: x.flip(-1),
    "as_strided of a product": lambda x: (x * 2.0).as_strided((5, 3), (3, 2), 4),
    "narrow": lambda x: x.narrow(-2, 2, 4),
    "squeezed": lambda x: x[..., None, :].squeeze(-2),
    "moved": lambda x: x.unflatten(-1, (2, -1)).movedim(-1, 0),
}
CONSUMERS: Mapping[str, Function] = {
    "exp": torch.exp,
    "sum": lambda v: v.sum(-1),
    "whole sum": lambda v: v.sum(),
    "softmax": lambda v: torch.softmax(v, 0),
    "added": lambda v: v + v * 2.0,
    "copied": lambda v: v.contiguous(),
    "flat": lambda v: v.reshape(-1) * 1.0,
    "written": lambda v: v.clone().mul_(3.0).add_(1.0),
    "argmax": lambda v: v.argmax(-1),
    "cumsum": lambda v: v.cumsum(0),
    "product": lambda v: v.reshape(-1, v.shape[-1]) @ v.reshape(-1, v.shape[-1]).t(),
}


def _layouts(generator: torch.Generator, extent: int) -> Problem:
    del extent
    parts = _Collected()
    x = normal(generator, 12, 18)
    for layout, view in LAYOUTS.items():
        for consumer, function in CONSUMERS.items():
            parts.add(f"{consumer}, {layout}", partial(_after, view, function), x)
    return parts.problem()


def _after(view: Function, function: Function, x: Tensor) -> Any:
    return function(view(x))


def _convolutions(generator: torch.Generator, extent: int) -> Problem:
    """Convolutions of 1 to 3 dimensions, and transposed ones, with options one at a time and together."""
    del extent
    parts = _Collected()
    options: Mapping[str, dict[str, Any]] = {
        "plain": {},
        "padding": {"padding": 1},
        "stride": {"stride": 2},
        "stride 3, padding 2": {"stride": 3, "padding": 2},
        "dilation": {"dilation": 2},
        "dilation and stride": {"dilation": 2, "stride": 2, "padding": 2},
        "groups": {"groups": 2, "padding": 1},
        "uneven": {"padding": (1, 0), "stride": (1, 2), "dilation": (2, 1)},
    }
    for name, chosen in options.items():
        groups = chosen.get("groups", 1)
        x, weight, bias = normal(generator, 2, 4, 11, 13), normal(generator, 6, 4 // groups, 3, 3), normal(generator, 6)
        parts.add(f"conv2d, {name}", partial(functional.conv2d, **chosen), x, weight, bias)
        x, weight = normal(generator, 2, 6, 7, 6), normal(generator, 6, 4 // groups, 3, 3)
        parts.add(f"transposed, {name}", partial(functional.conv_transpose2d, **chosen), x, weight)
    x, weight = normal(generator, 2, 4, 6, 7), normal(generator, 4, 3, 3, 3)
    parts.add("transposed, output padding", partial(functional.conv_transpose2d, stride=2, output_padding=1), x, weight)
    for size in FEW_SIZES:
        parts.add(
            f"conv1d of {size}",
            partial(functional.conv1d, padding=1),
            normal(generator, 2, 3, size),
            normal(generator, 4, 3, 3),
        )
        if size <= 129:
            x = normal(generator, 1, size, 6, 5)
            parts.add(f"{size} channels", partial(functional.conv2d, padding=1), x, normal(generator, 5, size, 3, 3))
            parts.add(
                f"{size} filters", functional.conv2d, normal(generator, 1, 3, 6, 5), normal(generator, size, 3, 3, 3)
            )
            parts.add(
                f"depthwise {size}",
                partial(functional.conv2d, groups=size, padding=1),
                x,
                normal(generator, size, 1, 3, 3),
            )
            parts.add(f"pointwise {size}", functional.conv2d, x, normal(generator, 4, size, 1, 1))
    parts.add(
        "conv3d",
        partial(functional.conv3d, padding=1, stride=2),
        normal(generator, 1, 3, 5, 6, 7),
        normal(generator, 4, 3, 3, 3, 3),
    )
    for side in (1, 2, 5, 7):
        parts.add(
            f"kernel of {side}",
            partial(functional.conv2d, padding=side // 2),
            normal(generator, 1, 3, 9, 10),
            normal(generator, 4, 3, side, side),
        )
    return parts.problem()


def _windows(generator: torch.Generator, extent: int) -> Problem:
    """Pooling, padding and interpolation with their options."""
    del extent
    parts = _Collected()
    x = normal(generator, 2, 3, 11, 13)
    line = normal(generator, 2, 3, 19)
    for name, chosen in {
        "plain": {},
        "stride": {"stride": 1},
        "padding": {"padding": 1},
        "ceil": {"ceil_mode": True, "stride": 3},
        "ceil and padding": {"ceil_mode": True, "padding": 1, "stride": 2},
    }.items():
        parts.add(f"max pool, {name}", partial(functional.max_pool2d, kernel_size=3, **chosen), x)
        parts.add(f"average pool, {name}", partial(functional.avg_pool2d, kernel_size=3, **chosen), x)
        parts.add(f"max pool 1-D, {name}", partial(functional.max_pool1d, kernel_size=3, **chosen), line)
        parts.add(f"average pool 1-D, {name}", partial(functional.avg_pool1d, kernel_size=3, **chosen), line)
    parts.add("max pool, dilation", partial(functional.max_pool2d, kernel_size=2, dilation=2, stride=1), x)
    parts.add(
        "average pool without padding",
        partial(functional.avg_pool2d, kernel_size=3, padding=1, count_include_pad=False),
        x,
    )
    parts.add("average pool with a divisor", partial(functional.avg_pool2d, kernel_size=2, divisor_override=3), x)
    for size in ((1, 1), (4, 5), (7, 7), (13, 17)):
        parts.add(f"adaptive average pool to {size}", partial(functional.adaptive_avg_pool2d, output_size=size), x)
        parts.add(f"adaptive max pool to {size}", partial(functional.adaptive_max_pool2d, output_size=size), x)
    for mode in ("constant", "reflect", "replicate", "circular"):
        parts.add(f"pad, {mode}", partial(functional.pad, pad=(2, 1, 3, 2), mode=mode), x)
    parts.add("pad, negative", partial(functional.pad, pad=(-1, 2, -2, -3)), x)
    for factor in (0.6, 1.7, 2.0, 3.0):
        parts.add(f"nearest by {factor}", partial(functional.interpolate, scale_factor=factor, mode="nearest"), x)
        for aligned in (False, True):
            parts.add(
                f"bilinear by {factor}{', aligned' * aligned}",
                partial(functional.interpolate, scale_factor=factor, mode="bilinear", align_corners=aligned),
                x,
            )
    parts.add("pixel shuffle", lambda x: functional.pixel_shuffle(x[:, :, :10, :12].repeat(1, 4, 1, 1), 2), x)
    parts.add("unfold", partial(functional.unfold, kernel_size=3, stride=2, padding=1), x)
    parts.add("fold", partial(functional.fold, output_size=(6, 7), kernel_size=2), normal(generator, 2, 12, 30))
    return parts.problem()


def _indices(generator: torch.Generator, extent: int) -> Problem:
    """Reads and writes by index: repeated, negative and unsorted ones, at sizes around those of blocks; joins of many tensors."""
    del extent
    parts = _Collected()
    for size in FEW_SIZES:
        x, source = normal(generator, size, 3), normal(generator, 2 * size + 1, 3)
        rows = integers(generator, 0, size, 2 * size + 1)
        wide = rows[:, None].expand(-1, 3).contiguous()
        parts.add(f"index_select of {size}", lambda x, rows: x.index_select(0, rows), x, rows)
        parts.add(f"index_add of {size}", lambda x, rows, source: x.index_add(0, rows, source), x, rows, source)
        parts.add(f"gather of {size}", lambda x, wide: x.gather(0, wide), x, wide)
        parts.add(f"scatter_add of {size}", lambda x, wide, source: x.scatter_add(0, wide, source), x, wide, source)
        parts.add(
            f"scatter_reduce of {size}",
            lambda x, wide, source: x.scatter_reduce(0, wide, source, "amax"),
            x,
            wide,
            source,
        )
        parts.add(f"brackets of {size}", lambda x, rows: x[rows - x.shape[0]], x, rows)
        parts.add(
            f"put of {size}", lambda x, rows, source: x.index_put((rows,), source, accumulate=True), x, rows, source
        )
        parts.add(f"embedding of {size}", lambda rows, x: functional.embedding(rows, x, padding_idx=0), rows, x)
        parts.add(f"mask of {size}", lambda x: [x.masked_fill(x > 0.5, -1.0), torch.where(x < 0, x, 0.0)], x)
        parts.add(f"masked select of {size}", lambda x: (x * (x > 0)).sum(0), x)
        parts.add(f"one-hot of {size}", lambda rows, x: functional.one_hot(rows, x.shape[0]), rows, x)
        parts.add(f"cat of {size}", lambda x: torch.cat([x[: k + 1] for k in range(min(len(x), 40))]), x)
        parts.add(f"stack of {size}", lambda x: torch.stack([x, -x, x * 2.0], 1), x)
        parts.add(
            f"bincount of {size}",
            lambda rows, x: torch.zeros_like(x[:, 0]).scatter_add(0, rows, torch.ones_like(rows, dtype=x.dtype)),
            rows,
            x,
        )
    logits, target = normal(generator, 9, 5), integers(generator, 0, 5, 9)
    ignored = torch.where(torch.arange(9) % 3 == 0, -100, target)
    for reduction in ("none", "mean", "sum"):
        parts.add(f"cross entropy, {reduction}", partial(functional.cross_entropy, reduction=reduction), logits, target)
        parts.add(
            f"cross entropy, ignored, {reduction}",
            partial(functional.cross_entropy, reduction=reduction),
            logits,
            ignored,
        )
        parts.add(
            f"cross entropy, smoothed, {reduction}",
            partial(functional.cross_entropy, reduction=reduction, label_smoothing=0.1),
            logits,
            target,
        )
    sorted_to = torch.linspace(-2, 2, 33)
    parts.add(
        "searchsorted",
        lambda edges, x: [torch.searchsorted(edges, x), torch.bucketize(x, edges, right=True)],
        sorted_to,
        logits,
    )
    return parts.problem()


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _integers(generator: torch.Generator, extent: int) -> Problem:
    """Integers up to the ends of their range: what overflows wraps around."""
    del extent
    parts = _Collected()
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        word = str(dtype).removeprefix("torch.")
        a = integers(generator, -(2**20), 2**20, 7, 33).to(dtype)
        a[0, :4] = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
        b = integers(generator, 1, 7, 7, 33).to(dtype)
        signed = b if dtype == torch.uint8 else b * (1 - 2 * integers(generator, 0, 2, 7, 33).to(dtype))
        parts.add(
            f"{word}, sums", lambda a, b: [a + b, a - b, a * b, a + a, a * a, -a if a.dtype != torch.uint8 else a], a, b
        )
        parts.add(f"{word}, quotients", _quotients, a[1:], signed[1:])
        parts.add(f"{word}, bits", lambda a, b: [a & b, a | b, a ^ b, ~a, a << (b % 4), a >> (b % 4)], a, b)
        parts.add(
            f"{word}, order",
            lambda a, b: [
                torch.maximum(a, b),
                a.clamp(-5 if a.dtype != torch.uint8 else 3, 9),
                a < b,
                a == b,
                a.sort(-1).values,
            ],
            a,
            b,
        )
        parts.add(
            f"{word}, reductions",
            lambda a: [a.sum(), a.sum(-1), a.amax(0), a.amin(-1), a.argmax(-1), a.cumsum(-1), a.prod(-1)],
            a,
        )
        parts.add(f"{word}, in floating point", lambda a: [a.float(), a / 3, a.float().mean(-1), a * 0.5], a)
        parts.add(f"{word}, casts", lambda a: [a.to(other) for other in (*INTEGERS, torch.bool)], a)
    return parts.problem()


def _quotients(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")]


def _attention(generator: torch.Generator, extent: int) -> Problem:
    """Attention with queries, keys and heads of each of a few sizes, causal, masked and with fewer keys than queries."""
    del extent
    parts = _Collected()
    for size in (1, 3, 17, 64, 129):
        q, k, v = (normal(generator, 1, 2, size, 8) for _ in range(3))
        parts.add(f"{size} positions", functional.scaled_dot_product_attention, q, k, v)
        parts.add(
            f"{size} positions, causal", partial(functional.scaled_dot_product_attention, is_causal=True), q, k, v
        )
        parts.add(f"{size} keys", functional.scaled_dot_product_attention, normal(generator, 1, 2, 5, 8), k, v)
        mask = normal(generator, size, size)
        parts.add(
            f"{size} positions, biased",
            functional.scaled_dot_product_attention,
            q,
            k,
            v,
            mask,
        )
    for width in (1, 4, 16, 33, 64, 80, 128):
        q, k, v = (normal(generator, 1, 1, 9, width) for _ in range(3))
        parts.add(f"heads of {width}", functional.scaled_dot_product_attention, q, k, v)
    parts.add(
        "a scale",
        partial(functional.scaled_dot_product_attention, scale=0.3),
        *(normal(generator, 1, 1, 9, 8) for _ in range(3)),
    )
    return parts.problem()


_FORWARD = frozenset({Mode.FORWARD})
_BOTH = frozenset({Mode.FORWARD, Mode.BACKWARD})
_TECHNIQUES = frozenset({"eager", "compile-static"})
_EAGER = frozenset({"eager"})
_ROWS = tuple(ROWS)


def _workload(
    name: str,
    summary: str,
    make: Callable[..., Problem],
    modes: frozenset[Mode] = _FORWARD,
    dtypes: tuple[str, ...] = ("float32",),
    techniques: frozenset[str] = _TECHNIQUES,
) -> Workload:
    return Workload(
        name,
        summary,
        make,
        level=2,
        modes=modes,
        dtypes=frozenset(dtypes),
        traits=frozenset({"domain"}),
        techniques=techniques,
        given=True,
    )


def _parts_of(names: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    return [names[number::count] for number in range(count)]


WORKLOADS = (
    *(
        _workload(
            f"values-unary-{number + 1}",
            f"Every binade of {', '.join(names)}.",
            partial(_unary, names=names, lowest=-126, highest=127),
        )
        for number, names in enumerate(_parts_of(tuple(UNARY), 3))
    ),
    _workload(
        "values-unary-half",
        "The binades that half precision has, of all functions of one argument.",
        partial(_unary, names=tuple(name for name in UNARY if not name.startswith("to ")), lowest=-7, highest=2),
        dtypes=("bfloat16", "float16"),
    ),
    _workload("values-near", "Functions near their zeros, ties and poles.", _near),
    _workload("values-quotients", "Remainders of large quotients.", _large_quotients),
    _workload("values-integers", "Integers to the ends of their range.", _integers),
    _workload(
        "sizes-elementwise",
        "Elementwise operators of vectors of each size, and all of one matrix.",
        _elementwise,
        _BOTH,
    ),
    *(
        _workload(
            f"sizes-rows-{number + 1}",
            f"Rows of each size: {', '.join(names)}.",
            partial(_rows, names=names, across=False),
        )
        for number, names in enumerate(_parts_of(_ROWS, 3))
    ),
    *(
        _workload(
            f"sizes-columns-{number + 1}",
            f"Columns of each size: {', '.join(names)}.",
            partial(_rows, names=names, across=True),
            techniques=_EAGER,  # a compiler adds thousands of rows up one after the other, which errs more, and may
        )
        for number, names in enumerate(_parts_of(_ROWS, 3))
    ),
    _workload("sizes-products", "Matrix products with a side of each size.", partial(_products, batched=False), _BOTH),
    _workload(
        "sizes-batched-products",
        "Batched matrix products with a side of each size.",
        partial(_products, batched=True),
        _BOTH,
    ),
    _workload("sizes-attention", "Attention of each of a few sizes.", _attention),
    _workload("sizes-indices", "Reads and writes by index, and joins, of each of a few sizes.", _indices, _BOTH),
    _workload("options-convolutions", "Convolutions with each of their options.", _convolutions, _BOTH),
    _workload("options-windows", "Pooling, padding and interpolation with each of their options.", _windows, _BOTH),
    _workload("layouts", "Views of each kind before operators of each kind.", _layouts, _BOTH),
)
