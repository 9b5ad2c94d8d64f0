"""Families of operators at extents that others lack: long axes, many dimensions, scalars in memory, ranges.

Kernels count blocks, planes and rows in 16 bits, keep an axis in registers up to some length, merge dimensions of size
1, and read a scalar at the beginning of its memory. Integers beyond 2**24 and 2**53 are no floating-point numbers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.families import BINARY, LAYOUTS, ROWS
from accelcheck.workloads.function_parts import BOTH, Collected, Function, binades, family

MANY = 70001
"""Number of rows, planes, batches or columns: more than 16 bits count."""
PLANES: Mapping[str, Function] = {
    "max pool": lambda x: functional.max_pool2d(x, 2),
    "average pool": lambda x: functional.avg_pool2d(x, 2),
    "adaptive pool": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "nearest": lambda x: functional.interpolate(x, scale_factor=2),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad": lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"),
    "group norm": lambda x: functional.group_norm(x, x.shape[1]),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "roll": lambda x: x.roll(1, 1),
}


def _many(parts: Collected) -> None:
    rows, chosen = normal(parts.generator, MANY, 3), integers(parts.generator, 0, MANY, 50)
    for name, function in ROWS.items():
        parts.add(f"{name} of rows", function, rows)
    parts.add("linear of rows", functional.linear, rows, (2, 3), (2,))
    parts.add("columns of a product", torch.matmul, (2, 3), (3, MANY))
    parts.add("batches of products", torch.bmm, (MANY, 2, 2), (MANY, 2, 1))
    parts.add("positions of conv1d", functional.conv1d, (1, 1, MANY), (1, 1, 3))
    parts.add("filters of conv1d", functional.conv1d, (1, 1, 4), (MANY, 1, 3))
    near = torch.eye(2) * 3 + 0.1 * normal(parts.generator, MANY, 2, 2)
    parts.add("inverses of batches", torch.linalg.inv, near)
    planes = normal(parts.generator, 1, MANY, 2, 2)
    for name, function in PLANES.items():
        parts.add(f"{name} of planes", function, planes)
    parts.add("rows by index", lambda x, i: [x[i], x.index_select(0, i), functional.embedding(i, x)], rows, chosen)
    counted = integers(parts.generator, -(2**16), 2**16, 600_000)
    parts.add("distinct numbers", lambda n: list(torch.unique(n, return_counts=True)), counted)


LENGTHS = (1, 3, 8, 17, 33, 64, 129, 257, 1025, 1100, 4097)
AXES: Mapping[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in "sum mean cumsum softmax log_softmax logsumexp amax argmax nansum".split()
    },
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(3, dim),
    "var": lambda x, dim: x.var(dim, correction=0),
    **{
        name: partial(lambda x, dim, f: f(x, dim).values, f=getattr(torch, name))
        for name in "sort median cummax cummin max".split()
    },
    "topk": lambda x, dim: x.topk((x.shape[dim] + 1) // 2, dim).values,
    "diff": lambda x, dim: x.diff(dim=dim),
}
"""Functions along an axis."""


def _axes(parts: Collected) -> None:
    """Adds functions along the first axis and one in the middle, and counts of flags and bytes."""
    for length in LENGTHS:
        a, b = normal(parts.generator, length, 3), normal(parts.generator, 2, length, 2)
        for name, function in AXES.items():
            if name != "var" or length > 2:  # else constant
                parts.add(f"{name} of {length}", lambda a, b, f=function: [f(a, 0), f(b, 1)], a, b)
        parts.add(f"flags of {length}", _flags, a)


def _flags(x: Tensor) -> list[Tensor]:
    some, every, none = x > 0, x > -9, x > 9
    counts = [flags.to(dtype).cumsum(0) for flags in (some, every) for dtype in (torch.bool, torch.uint8)]
    return [*counts, every.sum(0), some.sum(0), none.any(0), every.all(0), some.long().prod(0)]


DIMENSIONS: Mapping[str, Function] = {
    "ones between": lambda x: x[:, None, :, None, None],
    "ones around": lambda x: x[None, :, :, None, None],
    "ones before": lambda x: x[None, None, :, :, None],
    "six": lambda x: x.reshape(2, 2, 3, 2, 3, 3).permute(5, 3, 4, 2, 0, 1),
    "seven": lambda x: x.reshape(2, 2, 3, 2, 3, 3, 1).permute(5, 6, 3, 4, 2, 0, 1),
}
ALONG: tuple[Function, ...] = (
    *(getattr(torch, name) for name in "sum amax mean argmax cumsum softmax".split()),
    lambda x, dim: x.sort(dim).values,
)
COPIES: tuple[Function, ...] = (
    Tensor.clone, Tensor.contiguous, Tensor.flatten, partial(Tensor.clone, memory_format=torch.contiguous_format),
    torch.isfinite, lambda v: torch.cat((v, v)), lambda v: v.flip(0, -1), lambda v: v.repeat(*(1,) * v.dim(), 2),
)  # fmt: skip


def _dimensions(parts: Collected) -> None:
    """Adds functions along each of many dimensions, and copies of each dtype."""
    x = normal(parts.generator, 12, 18)
    for layout, view in DIMENSIONS.items():
        dims = range(view(x).dim())
        parts.add(f"along, {layout}", lambda x, v=view, n=dims: [f(v(x), dim) for dim in n for f in ALONG], x)
        kinds: tuple[Function, ...] = (view, lambda x, v=view: v(x) > 0, lambda x, v=view: v(x * 9).long())
        parts.add(f"copies, {layout}", lambda x, k=kinds: [copy(kind(x)) for kind in k for copy in COPIES], x)


PICKED: Mapping[str, Function] = {"an element": lambda t: t[3], "of a part": lambda t: t[1:][2]}
FLAGS: tuple[Function, ...] = tuple(
    getattr(torch, name) for name in "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor eq".split()
)


def _scalars(parts: Collected) -> None:
    """Adds operators with an element of a tensor beside a matrix: it lies in the middle of memory."""
    t, x = torch.tensor([2.0, -3.0, 0.5, 1.5, 4.0, -0.25]), normal(parts.generator, 5, 7)
    counts, steps = integers(parts.generator, -9, 9, 5, 7), torch.tensor([1, 2, 3, 5, 6, 8])
    for place, pick in PICKED.items():
        for name, function in BINARY.items():
            parts.add(f"{name}, {place}", lambda x, t, f=function, p=pick: f(x, p(t)), x, t)
        flags = lambda x, t, p=pick: [  # noqa: E731 - it stands once
            *(f(x > 0, p(t < 2)) for f in FLAGS), torch.where(p(t < 2), x, -x), x.masked_fill(p(t < 2), 1.0)
        ]  # fmt: skip
        parts.add(f"flags, {place}", flags, x, t)
        parts.add(f"integers, {place}", lambda n, k, p=pick: [f(n, p(k)) for f in FLAGS] + [n * p(k)], counts, steps)


ALONE: Mapping[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (functional.linear, ((4, 3, 6), (5, 6), (5,))),
    "conv2d": (functional.conv2d, ((2, 3, 6, 6), (4, 3, 3, 3), (4,))),
    "attention": (functional.scaled_dot_product_attention, ((1, 2, 5, 8),) * 3),
    "baddbmm": (torch.baddbmm, ((2, 3, 4), (2, 3, 5), (2, 5, 4))),
    "addcmul": (torch.addcmul, ((4, 5), (4, 5), (5,))),
    "bilinear": (functional.bilinear, ((4, 3), (4, 5), (2, 3, 5))),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (6,), w, b), ((4, 3, 6), (6,), (6,))),
    "rms norm": (lambda x, w: functional.rms_norm(x, (6,), w), ((4, 3, 6), (6,))),
    "group norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), ((2, 6, 5), (6,), (6,))),
    "batch norm": (lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True), ((4, 6, 5), (6,), (6,))),
    "prelu": (functional.prelu, ((4, 6, 5), (6,))),
    "product": (torch.matmul, ((2, 4, 5), (2, 5, 3))),
}
"""Functions with a formula of the gradient for each input, and shapes of these."""


def _alone(parts: Collected) -> None:
    """Adds functions of inputs of which one alone needs a gradient."""
    for name, (function, shapes) in ALONE.items():
        for kept in range(len(shapes)):
            parts.add(f"{name}, input {kept}", partial(_one, function, kept), *shapes)


def _one(function: Function, kept: int, *inputs: Tensor) -> Any:
    return function(*(value if place == kept else value.detach() for place, value in enumerate(inputs)))


ORDER: tuple[Function, ...] = tuple(getattr(torch, name) for name in "eq ne lt le gt ge maximum isin".split())


def _neighbours(parts: Collected) -> None:
    """Adds integers that differ by 1 and complex numbers of every binade, and variances beside a large mean."""
    for power in (24, 31, 32, 53, 62):
        a = torch.tensor([2**power + step for step in (-2, -1, 0, 1)] + [-(2**power), -(2**power) - 1])
        parts.add(f"order of 2^{power}", lambda a: [f(a[:, None], a.flip(0)) for f in ORDER], a)
        parts.add(
            f"near 2^{power}",
            lambda a, n=2**power: [
                a == n + 1, a.clamp(n - 1, n), a.sort().values, a.argmax(), torch.searchsorted(a[:4].contiguous(), a),
                torch.arange(n - 2, n + 3, device=a.device), torch.full((3,), n + 1, device=a.device), a + 1, a % 3,
            ],
            a,
        )  # fmt: skip
    for number, (low, high) in enumerate(((-62, 60), (-120, -63), (61, 120))):
        x = binades(parts.generator, low, high)
        parts.add(f"complex {number}", lambda x: [f(torch.complex(x, x.flip(1))) for f in (torch.abs, torch.angle)], x)
    for mean in (100.0, 1000.0):
        parts.add(f"spread about {mean}", lambda x, m=mean: [(x + m).var(-1), (x + m).std(0)], (7, 200))


DRAWN = 40_000


def _bounds(parts: Collected) -> None:
    """Adds properties that all random numbers of a kind have, but for one draw in 10**15."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parts.add(f"floating, {dtype}", partial(_floating_bounds, dtype), (DRAWN,))
    for most in (2, 7, 100, 256):
        parts.add(f"integers below {most}", partial(_integers_drawn, most), (DRAWN,))
    parts.add("orders", lambda x: [torch.randperm(n, device=x.device).sort().values for n in (1, 17, 1000, MANY)], (1,))
    parts.add("certain", _certain, (50,))
    for name in ("transposed", "every other column", "every third row", "offset", "column", "permuted", "diagonal"):
        parts.add(f"written, {name}", partial(_drawn_through, LAYOUTS[name]), (12, 18))


def _floating_bounds(dtype: torch.dtype, x: Tensor) -> list[Tensor]:
    like = x.to(dtype)
    uniform = [torch.rand_like(like), torch.empty_like(like).uniform_()]
    return [
        *(((numbers >= 0) & (numbers < 1)).all() for numbers in uniform),
        (torch.empty_like(like).uniform_(-2, 3).abs() <= 3).all(),
        torch.randn_like(like).isfinite().all(),
        (torch.empty_like(like).exponential_() >= 0).all(),
    ]


def _integers_drawn(most: int, x: Tensor) -> list[Tensor]:
    draws = [torch.randint(most, x.shape, device=x.device), x.long().random_(most), x.long().random_(-3, most)]
    return [torch.unique(numbers) for numbers in (*draws, torch.randint_like(x.long(), -5, most))]


def _certain(x: Tensor) -> list[Tensor]:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0], device=x.device)
    return [
        torch.bernoulli((x > 0).float()),
        weights.multinomial(2).sort().values,
        torch.unique(weights.multinomial(900, replacement=True)),
        functional.dropout(x, 0.0),
        functional.dropout(x, 1.0),
    ]


def _drawn_through(view: Function, x: Tensor) -> list[Tensor]:
    """Returns where each of torch's functions that draw in place has written: a number is never 0."""
    held = []
    for draw in (
        Tensor.normal_, Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_, Tensor.uniform_, Tensor.random_,
    ):  # fmt: skip
        base = torch.zeros_like(x)
        draw(view(base), *_BOUNDS.get(draw, ()))
        held.append(base != 0)
    return held


_BOUNDS: Mapping[Function, tuple[float, ...]] = {
    Tensor.geometric_: (0.5,),
    Tensor.uniform_: (1, 2),
    Tensor.random_: (1, 9),
}
_EAGER = frozenset({"eager"})

WORKLOADS = (
    family("sizes-many", f"{MANY:,} rows, planes, batches, columns and positions.", _many, techniques=_EAGER, level=3),
    family("sizes-axes", "Axes of each size that are not the last.", _axes, BOTH, techniques=_EAGER),
    family("dimensions", "Many dimensions, some of them of size 1.", _dimensions, compiled=4),
    family("scalars", "Elements of a tensor beside a matrix.", _scalars, compiled=4),
    family("gradients-alone", "Functions of inputs of which one alone needs a gradient.", _alone,
        frozenset({Mode.BACKWARD}), compiled=4),
    family("values-neighbours", "Integers beyond 2^24, complex numbers of every binade, variances of large means.",
        _neighbours, compiled=4),
    family("random-bounds", "Properties of all random numbers of a kind.", _bounds, techniques=_EAGER),
)  # fmt: skip
