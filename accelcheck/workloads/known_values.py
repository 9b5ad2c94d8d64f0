"""Functions whose results are known otherwise than by torch's FP64, which has the same branches as its other dtypes.

Values of special functions follow from the NIST Digital Library of Mathematical Functions (https://dlmf.nist.gov,
chapters 4 to 10, 18 and 25), those of elementary functions from annex F of ISO C; SciPy gives the same. A function of
numbers treats each alone, though a kernel has other instructions for whole vectors than for the rest of a row.
"""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.devices.torch_names import per_tensor_quantized
from accelcheck.workloads.function_parts import KERNELS, KNOWN, Collected, Function, KnownFunction, family, table
from accelcheck.workloads.torch_operators import FILE

INF, NAN = math.inf, math.nan
SEARCHED = (1.0, 3.0, INF, NAN), (0.0, 2.0, 4.0, INF, NAN)
"""Sorted sequence, and numbers to look for: NaN is larger than any number, as in `torch.sort`."""
PLACES = [0, 1, 2, 2, 3], [0, 1, 2, 3, 4]
"""Places of these numbers, to the left and to the right of equal ones."""
RANGES = (0, 1.5, 1), (0, 2.5, 1), (0, 3, 1), (1, 7.5, 2), (0, 0, 1), (0, 0.5, 1), (-1, 1.5, 1), (5, 1.5, -1)
"""Starts, ends and steps, for ``ceil((end - start) / step)`` integers; the last two have negative ones."""
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
FACTORS = ((0.0, 5.0, 0.0, 1e20, 1e20, 2.0), (0.0, 5.0, 3.0, 1e20, 1e10, 2.0), (7.0, 5.0, 3.0, 1e10, 1e15, 2.0))
"""Factors with two zeros beside an overflow, with one zero, and with none."""
SPECIAL = (NAN, 0.3, -0.3, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, -0.5, 3.0, -3.0, 6.0, 0.25, NAN, 0.7)
"""Row of two vectors of eight numbers and a rest, with a NaN in each."""
FURTHER = frozenset({"nn.functional.prelu", "nn.functional.threshold", "nn.functional.rrelu", "fill", "frexp"})
"""Unary operators with further arguments that have no default, or with two results."""


def fixed(*values: Any) -> Function:
    """Function of anything that gives these values."""
    truths = [torch.tensor(value) for value in values]
    return lambda *_: truths if len(truths) > 1 else truths[0]


def _parted(function: Function, argument: float, x: Tensor) -> list[Tensor]:
    """Mantissas and exponents of a function in float64, whose squares would overflow."""
    return list(torch.frexp(function(torch.full((), argument, dtype=torch.float64, device=x.device))))


def _places(edges: Tensor, values: Tensor) -> list[Tensor]:
    sides = (False, True)
    found = [torch.searchsorted(edges, values, right=right) for right in sides]
    return [*found, *(torch.bucketize(values, edges, right=right) for right in sides)]


def _ranges(dtype: torch.dtype, bounds: Sequence[tuple[float, float, float]], x: Tensor) -> list[Tensor]:
    return [torch.arange(*bound, dtype=dtype, device=x.device) for bound in bounds]


def _others(x: Tensor) -> Tensor:
    """Gradients of the products of rows: the products of all other factors."""
    return torch.stack([torch.cat((x[:, :k], x[:, k + 1 :]), 1).prod(-1) for k in range(x.shape[1])], 1)


def _facts(parts: Collected) -> None:
    for name, function, text in table("values"):
        points = [tuple(map(float, point.split())) for point in text.split(";")]
        *arguments, values = map(torch.tensor, zip(*points, strict=True))
        parts.add(name, KnownFunction(function, fixed(values.tolist())), *arguments)
    x = torch.ones(1)
    for name, function, text in table("large"):
        argument, value = map(float, text.split())
        parts.add(
            f"{name} of {argument:g}", KnownFunction(partial(_parted, function, argument), fixed(*math.frexp(value))), x
        )


def _answers(parts: Collected) -> None:
    x = torch.ones(1)
    parts.add("searches", KnownFunction(_places, fixed(*PLACES, *PLACES)), *map(torch.tensor, SEARCHED))
    for dtype in DTYPES:
        bounds = RANGES if dtype.is_signed else RANGES[:-2]
        truth = [[start + step * k for k in range(math.ceil((end - start) / step))] for start, end, step in bounds]
        label = f"arange, {dtype}".replace("torch.", "")
        parts.add(label, KnownFunction(partial(_ranges, dtype, bounds), fixed(*truth)), x)
    slopes: Any = torch.func.grad(torch.prod)
    for name, function in {
        "rows": torch.func.grad(lambda x: x.prod(-1).sum()),
        "each row": lambda x: torch.stack([slopes(row) for row in x]),
        "mapped rows": torch.func.vmap(slopes),
    }.items():
        parts.add(f"gradient of prod of {name}", KnownFunction(function, _others), torch.tensor(FACTORS))


def elementwise() -> Iterator[tuple[str, Function]]:
    """Yields differentiable functions of torch that treat each element alone, and some with options."""
    for name, entry in json.loads(FILE.read_text(encoding="utf-8")).items():
        if entry["family"] == "unary" and entry.get("floating", {}).get("gradients") and name not in FURTHER:
            function = getattr(functional if name.startswith("nn.") else torch, name.rpartition(".")[2], None)
            if callable(function):
                yield name, function
    yield from ((text, function) for text, function, _ in table("ends"))


def _slopes(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.func.grad(lambda y: function(y).sum())(x)
    return result


def _together(function: Function, x: Tensor) -> list[Tensor]:
    """Results of a row, and of two rows with a gap in memory between them."""
    return [function(x[0, : len(SPECIAL)]), function(x[:, : len(SPECIAL)])]


def _one_by_one(function: Function, x: Tensor) -> list[Tensor]:
    rows = torch.cat([function(x[:, place : place + 1]) for place in range(len(SPECIAL))], 1)
    return [rows[0], rows]


def _elements(parts: Collected) -> None:
    x = torch.tensor((SPECIAL * 2)[:24]).repeat(2, 1)
    for name, function in elementwise():
        for label, chosen in ((name, function), (f"gradient of {name}", partial(_slopes, function))):
            parts.add(label, KnownFunction(partial(_together, chosen), partial(_one_by_one, chosen)), x)


LEVELS = {torch.qint8: (-128, 127), torch.quint8: (0, 255), torch.qint32: (-(2**31), 2**31 - 1)}
SCALES = (15.0, 3.0, 0.75, 7.0)
"""Scales whose halves are numbers of float32, and whose reciprocals, but for one, are not."""


def _level(low: int, high: int, scale: float, zero: int, x: Tensor) -> Tensor:
    """Levels of numbers: the nearest one, the even one of two, within the range."""
    return (torch.round(x.double() / scale) + zero).clamp(low, high).long()


def _quantized(parts: Collected) -> None:
    """Adds levels of ties and of numbers beyond the range, and numbers of the outermost levels."""
    halves = torch.arange(-300.0, 301.0) / 2
    for scale in SCALES:
        x = halves * scale
        one = torch.tensor([scale])
        for dtype, (low, high) in LEVELS.items():
            zero = 4 if dtype != torch.qint32 else 0  # an even one, which moves no tie
            word = f"{dtype}, scale {scale}".replace("torch.", "")
            levels = partial(_level, low, high, scale, zero)

            def of_tensor(x: Tensor, dtype: Any = dtype, scale: float = scale, zero: int = zero) -> Tensor:
                return torch.quantize_per_tensor(x.float(), scale, zero, dtype).int_repr()

            def of_channel(x: Tensor, dtype: Any = dtype, one: Tensor = one, zero: int = zero) -> Tensor:
                return torch.quantize_per_channel(x.float()[None], one, torch.tensor([zero]), 0, dtype).int_repr()[0]

            parts.add(f"levels, {word}", KnownFunction(of_tensor, levels), x)
            if dtype != torch.qint32:
                parts.add(f"levels by channel, {word}", KnownFunction(of_channel, levels), x)
                fake = partial(_fake, low, high, scale, zero)
                parts.add(
                    f"rounded, {word}", KnownFunction(fake, lambda x, f=levels, s=scale, z=zero: (f(x) - z) * s), x
                )
    for zero in (0, 2**31 - 1, -(2**31)):
        ends = torch.tensor([2**31 - 1, 0, -(2**31)], dtype=torch.int32)
        truth = fixed(((ends.double() - zero) * 2.0**-30).tolist())
        parts.add(
            f"numbers, zero {zero}",
            KnownFunction(
                lambda levels, _, zero=zero: torch.dequantize(per_tensor_quantized(levels, 2.0**-30, zero)), truth
            ),
            ends,
            torch.ones(1),
        )


def _fake(low: int, high: int, scale: float, zero: int, x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, low, high)


_known = partial(family, traits=KNOWN)
WORKLOADS = (
    _known("known-values", "Functions at poles, infinities and other points with known values.",
        _facts, techniques=KERNELS),
    _known("known-answers", "Searches, ranges and gradients of products.", _answers, techniques=KERNELS),
    _known("known-elements", "Functions of vectors, and their gradients, element by element.",
        _elements, techniques=frozenset({"eager"})),
    _known("known-levels", "Levels and numbers of quantized tensors.", _quantized, techniques=frozenset({"eager"})),
)  # fmt: skip
