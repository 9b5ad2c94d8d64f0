"""Families of operators at values, sizes, strides and options where kernels branch, many in one graph.

A kernel has a path for a whole vector and one for its rest, for a row that fits a block and one that does not, for a
reduced argument and a full one. Sizes lie around powers of 2 for that reason, values in every binade, and each result
stands alone, so that a failure names the function and the size.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.function_parts import BOTH, Collected, Function, binades, family, near, sign_of

SIZES = (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65, 129, 256, 257, 513, 1025, 2049, 4097)
"""Sizes below, at and above those of vectors, warps and blocks."""
LARGEST = 129
"""Largest size of a product with three equal sides."""
ALL = (-120, 120)
"""Binades of float32 whose reciprocals, and products with small integers, are normal numbers."""


_GROWING = (-120, 5)
"""Binades of arguments of exponentials, which stay below 64."""
_NAMED: Mapping[tuple[int, int], tuple[str, str]] = {
    ALL: ("abs neg sign relu reciprocal hardtanh atan", "sqrt rsqrt log log2 log10 log1p"),
    _GROWING: ("exp exp2 expm1 sinh cosh tanh sigmoid silu softplus logsigmoid elu selu", ""),
    (-120, 3): ("mish", ""),
    (-120, 1): ("gelu", ""),
    (-60, 60): ("square hardswish", ""),
    (-20, 60): ("hardsigmoid", ""),
    (-110, 120): ("leaky_relu", ""),
    (-120, 60): ("softsign asinh", ""),
    (-110, 2): ("erf", ""),
    (-110, 1): ("erfc", ""),
    (-120, 12): ("sin cos", ""),
    (-120, 8): ("tan", ""),
    (-120, -2): ("asin acos atanh", ""),
    (-110, -2): ("erfinv", ""),
    (1, 60): ("", "acosh"),
    (-20, 20): ("", "lgamma digamma"),
    (-20, 26): ("floor ceil round trunc", ""),
}
"""Functions by the binades of their argument, which may be negative for the first and not for the second ones."""
UNARY: Mapping[str, tuple[Function, tuple[int, int], bool]] = {
    **{
        name: (getattr(torch, name, None) or getattr(functional, name), reach, not number)
        for reach, texts in _NAMED.items()
        for number, text in enumerate(texts)
        for name in text.split()
    },
    "cube": (lambda x: x**3, (-40, 40), True),
    "power of one half": (lambda x: x**0.5, ALL, False),
    "power of -1.5": (lambda x: x**-1.5, (-60, 60), False),
    "log1p below 0": (lambda x: torch.log1p(-x), (-120, -2), False),
    "gelu by tanh": (partial(functional.gelu, approximate="tanh"), (-120, 1), True),
    "to int32": (lambda x: x.to(torch.int32), (-20, 29), True),
    "to int64": (lambda x: x.to(torch.int64), (-20, 61), True),
    "to bool": (lambda x: x.to(torch.bool), ALL, True),
}
"""Functions with the binades of their argument, and True where that may be negative."""

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


def _unary(parts: Collected, *, names: tuple[str, ...], lowest: int, highest: int) -> None:
    drawn: dict[tuple[int, int, bool], Tensor] = {}
    for name in names:
        function, (low, high), negative = UNARY[name]
        key = max(low, lowest), min(high, highest), negative
        if key not in drawn:
            drawn[key] = binades(parts.generator, key[0], key[1], negative=negative)
        parts.add(name, function, drawn[key])


def _near(parts: Collected) -> None:
    for name, (function, point, nearest, sides) in NEAR.items():
        parts.add(name, function, near(parts.generator, point, nearest, sides=sides))
    ties = torch.arange(-33, 33) + 0.5
    parts.add("round of ties", torch.round, ties)
    parts.add(
        "signs of zeros",
        lambda x: [sign_of(v) for v in (x.clone(), -x, x.abs(), x.floor(), x.ceil(), x.round(), x.trunc(), x.flip(0))],
        _ZEROS,
    )
    whole = integers(parts.generator, 1, 200, 64).float()
    parts.add(
        "exact quotients", lambda a, b: [torch.floor_divide(a * b, b), torch.remainder(a * b, b)], whole, whole.flip(0)
    )


_ZEROS = torch.tensor([0.0, -0.0, 0.0, -0.0])

BINARY: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "add sub mul div maximum minimum fmod remainder atan2 hypot".split()},
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "power": lambda a, b: a.abs() ** b.clamp(-3, 3),
    "comparison": lambda a, b: [a < b, a <= b, a > b, a >= b, a == b, a != b],
    "addition of a number": lambda a, b: a + 1.5 - b * 0.25,
}


def _elementwise(parts: Collected) -> None:
    for size in SIZES:
        a, b = normal(parts.generator, size), normal(parts.generator, size)
        for name in ("add", "mul", "div", "where", "maximum"):
            parts.add(f"{name} of {size}", BINARY[name], a, b)
        parts.add(f"exp of {size}", torch.exp, a)
        parts.add(f"tanh of {size}", torch.tanh, a)
    a, b = normal(parts.generator, 37, 65), normal(parts.generator, 37, 65)
    for name, function in BINARY.items():
        parts.add(name, function, a, b)
    row, column = normal(parts.generator, 65), normal(parts.generator, 37, 1)
    parts.add("broadcast", lambda a, row, column: [a + row, a * column, row - column], a, row, column)
    parts.add("long", lambda x: x * 2.0 + 1.0, (70001,))


def _large_quotients(parts: Collected) -> None:
    """Adds remainders and quotients with up to 24 bits and more, of both signs."""
    b = binades(parts.generator, -8, 8)
    for shift in (0, 4, 12, 20, 28):
        a = torch.ldexp(b.flip(1) * (1.0 + torch.rand(b.shape, generator=parts.generator)), torch.tensor(shift))
        parts.add(f"remainder, quotients of 2^{shift}", torch.remainder, a, b)
        parts.add(f"fmod, quotients of 2^{shift}", torch.fmod, a, b)


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


def _rows(parts: Collected, *, names: tuple[str, ...], across: bool) -> None:
    """Adds functions of rows of each size, or of columns if `across`."""
    for size in SIZES:
        x = normal(parts.generator, size, 3) if across else normal(parts.generator, 3, size)
        for name in names:
            function = ROWS[name]
            if size > 2 or name not in {"var", "layer norm"}:  # else constant: 0, or 1 and -1
                parts.add(f"{name} of {size}", _turned(function) if across else function, x)
    many = normal(parts.generator, 4, 70001) if across else normal(parts.generator, 70001, 4)
    for name in names[:1]:
        parts.add(f"{name} of 70001 rows", _turned(ROWS[name]) if across else ROWS[name], many)


def _turned(function: Function) -> Function:
    return lambda x: function(x.transpose(0, 1))


def _products(parts: Collected, *, batched: bool) -> None:
    """Adds matrix products with one side of each size, and the others small."""
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
            a, b = normal(parts.generator, *lead, rows, depth), normal(parts.generator, *lead, depth, columns)
            parts.add(f"{rows} x {depth} x {columns}, {name}", torch.matmul, a, b)
        if not batched:
            a, b = normal(parts.generator, size, 9), normal(parts.generator, 9)
            parts.add(f"vector {size}", torch.mv, a, b)
            parts.add(f"turned {size}", lambda a, b: a.t() @ b, (size, 6), (size, 4))
            parts.add(f"linear {size}", functional.linear, (3, size), (5, size), (5,))
    if batched:
        parts.add("many batches", torch.bmm, (700, 3, 4), (700, 4, 2))
        parts.add("broadcast batch", torch.matmul, (1, 5, 6), (4, 6, 3))
    else:
        nan = torch.full((4, 5), torch.nan)
        product = normal(parts.generator, 4, 6), normal(parts.generator, 6, 5)
        parts.add("beta of 0 with NaN", lambda c, a, b: torch.addmm(c, a, b, beta=0), nan, *product)
        parts.add("beta and alpha", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2.0), (4, 5), *product)
        parts.add("outer", torch.outer, (33,), (65,))


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
    "softmax": lambda v: torch.softmax(v, 0),
    "added": lambda v: v + v * 2.0,
    "copied": lambda v: v.clone(memory_format=torch.contiguous_format),
    "flat": lambda v: v.reshape(-1) * 1.0,
    "written": lambda v: v.clone().mul_(3.0).add_(1.0),
    "argmax": lambda v: v.argmax(-1),
    "cumsum": lambda v: v.cumsum(0),
    "product": lambda v: v.reshape(-1, v.shape[-1]) @ v.reshape(-1, v.shape[-1]).t(),
    "joined": lambda v: torch.cat((v, v[:1])),
    "rolled": lambda v: v.roll(1, 0),
    "scattered": lambda v: torch.slice_scatter(v, v[1:2].exp(), 0, 0, 1),
    "chosen": lambda v: torch.where(v > 0, v, 0.5),
}


def _layouts(parts: Collected) -> None:
    for layout, view in LAYOUTS.items():
        x = normal(parts.generator, 12, 18)
        for consumer, function in CONSUMERS.items():
            parts.add(f"{consumer}, {layout}", partial(_after, view, function), x)


def _after(view: Function, function: Function, x: Tensor) -> Any:
    return function(view(x))


WRITES: Mapping[str, Function] = {
    "add": lambda x: x.add_(1),
    "multiply": lambda x: x.mul_(-2),
    "zero": lambda x: x.zero_(),
    "relu": lambda x: x.relu_(),
    "rows": lambda x: x[:1].fill_(3),
    "masked": lambda x: x.masked_fill_(x > 0, -1),
    "shifted": lambda x: x[1:].copy_(x[:-1].clone()) if len(x) > 1 else x.neg_(),
}
"""Writes to a tensor, by name."""


def _read_before(view: Function, write: Function, x: Tensor, y: Tensor) -> Any:
    return _written_after(lambda v: view(v) * 2, write, x)


def _written_through(view: Function, write: Function, x: Tensor, y: Tensor) -> Any:
    write(view(x))
    return x + y


def _source_written(view: Function, write: Function, x: Tensor, y: Tensor) -> Any:
    view(x).copy_(view(y))
    write(y)
    return view(x) + 1


ORDERS: Mapping[str, tuple[Function, tuple[int, ...]]] = {
    "read before": (_read_before, (0,)),
    "written through": (_written_through, (0,)),
    "source written": (_source_written, (0, 1)),
}
"""Functions that read and write in turn, with the places, of two inputs, that each writes to."""


def _writes(parts: Collected) -> frozenset[int]:
    """Adds writes to inputs, through each view, before or after a read; returns the places of the written inputs."""
    written = set[int]()
    for number, (layout, view) in enumerate(LAYOUTS.items()):
        if layout in {"expanded", "windows"}:
            continue  # elements share memory, and writes to them are undefined
        for turn, (name, write) in enumerate(WRITES.items()):
            order, (function, places) = list(ORDERS.items())[(number + turn) % len(ORDERS)]
            first = len(parts.inputs)
            parts.add(f"{name}, {order}, {layout}", partial(function, view, write), (12, 18), (12, 18))
            written |= {first + place for place in places}
    return frozenset(written)


def _late_writes(parts: Collected) -> frozenset[int]:
    """Adds writes to inputs after operators of each kind have read them; returns the places of the inputs."""
    for consumer, read in CONSUMERS.items():
        for name, write in WRITES.items():
            parts.add(f"{name}, {consumer}", partial(_written_after, read, write), (12, 18))
    return frozenset(range(len(parts.inputs)))


def _written_after(read: Function, write: Function, x: Tensor) -> Any:
    before = read(x)
    write(x)
    return before


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _integers(parts: Collected) -> None:
    """Adds integers up to the ends of their range, where overflows wrap around."""
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        word = str(dtype).removeprefix("torch.")
        a = integers(parts.generator, -(2**20), 2**20, 7, 33).to(dtype)
        a[0, :4] = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
        b = integers(parts.generator, 1, 7, 7, 33).to(dtype)
        signed = b if dtype == torch.uint8 else b * (1 - 2 * integers(parts.generator, 0, 2, 7, 33).to(dtype))
        parts.add(
            f"{word}, sums", lambda a, b: [a + b, a - b, a * b, a + a, a * a, -a if a.dtype != torch.uint8 else a], a, b
        )
        wide = integers(parts.generator, max(info.min, -(2**62)), min(info.max, 2**62), 7, 33).to(dtype)
        parts.add(f"{word}, quotients", _quotients, a[1:], signed[1:])
        parts.add(f"{word}, full-width quotients", _quotients, wide, b)
        parts.add(f"{word}, powers", lambda b: [b**2, b**5, (b + 3) ** 9], b)
        parts.add(f"{word}, products", lambda b: [b @ b.t(), b[None, :1] @ b.t()[None], b[0] @ b[0]], b)
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


def _quotients(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc")]


_EAGER = frozenset({"eager"})
_ROWS = tuple(ROWS)


def _parts_of(names: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    return [names[number::count] for number in range(count)]


WORKLOADS = (
    *(
        family(f"values-unary-{number + 1}", f"Every binade of {', '.join(names)}.",
            partial(_unary, names=names, lowest=-126, highest=127))
        for number, names in enumerate(_parts_of(tuple(UNARY), 3))
    ),
    family("values-unary-half", "The binades that half precision has, of all functions of one argument.",
        partial(_unary, names=tuple(name for name in UNARY if not name.startswith("to ")), lowest=-7, highest=2),
        dtypes=("bfloat16", "float16"), compiled=2),
    family("values-near", "Functions near their zeros, ties and poles.", _near),
    family("values-quotients", "Remainders of large quotients.", _large_quotients),
    family("values-integers", "Integers to the ends of their range.", _integers),
    family("sizes-elementwise", "Elementwise operators of vectors of each size, and of one matrix.",
        _elementwise, BOTH),
    *(
        family(f"sizes-rows-{number + 1}", f"Rows of each size: {', '.join(names)}.",
            partial(_rows, names=names, across=False))
        for number, names in enumerate(_parts_of(_ROWS, 3))
    ),
    *(
        # A compiler may add thousands of rows one after the other, which errs more.
        family(f"sizes-columns-{number + 1}", f"Columns of each size: {', '.join(names)}.",
            partial(_rows, names=names, across=True), techniques=_EAGER)
        for number, names in enumerate(_parts_of(_ROWS, 3))
    ),
    family("sizes-products", "Matrix products with a side of each size.", partial(_products, batched=False), BOTH),
    family("sizes-batched-products", "Batched matrix products with a side of each size.",
        partial(_products, batched=True), BOTH),
    family("layouts", "Views of each kind before operators of each kind.", _layouts, BOTH),
    family("writes", "Writes to inputs through views of each kind, before and after they are read.", _writes),
    family("late-writes", "Writes to inputs after operators of each kind have read them.", _late_writes),
)  # fmt: skip
