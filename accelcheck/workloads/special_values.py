"""Operators of NaN, infinities, zeros of both signs and empty tensors, and each element of a vector alone.

A kernel treats whole vectors, the rest of a row and single elements by different instructions, which agree on numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.draw import normal
from accelcheck.workloads.function_parts import KERNELS, KNOWN, Collected, Known, family, sign_of
from accelcheck.workloads.torch_operators import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.workloads.function_parts import Function

INF, NAN = math.inf, math.nan
SPECIAL = (NAN, 0.3, -0.3, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, -0.5, 3.0, -3.0, 6.0, 0.25, NAN, 0.7)
"""A row of 19: two vectors of eight numbers and a rest, with a NaN in each."""
ENDS = """logit eps=0.0; logit eps=0.51; logit eps=0.75; hardtanh min_val=0.5 max_val=0.5; hardshrink lambd=0.0;
hardshrink lambd=-0.4; softshrink lambd=0.0; elu alpha=0.0; elu alpha=-1.5; celu alpha=-1.5; leaky_relu;
leaky_relu negative_slope=-2.0; leaky_relu negative_slope=3.0; softplus beta=2.0 threshold=-1.0; softplus beta=-2.0;
threshold threshold=0.25 value=7.0; clamp min=1.0 max=-1.0; clamp min=nan; clamp min=-0.25 max=0.75; round decimals=-1;
nan_to_num nan=inf posinf=1.0 neginf=nan; round decimals=3; pow exponent=0.0; pow exponent=-0.5; remainder other=0.25;
rrelu lower=0.25 upper=0.25; gelu; gelu approximate=tanh; hardswish"""
"""Functions of one argument with options at their ends, besides torch's own without options."""


def optioned(text: str) -> Function:
    """Function that a text names, with its options."""
    name, *options = text.split()
    values = dict(option.split("=") for option in options)
    chosen = {
        key: int(text) if key == "decimals" else text if text == "tanh" else float(text) for key, text in values.items()
    }
    return partial(getattr(functional, name, None) or getattr(torch, name), **chosen)


def elementwise() -> Mapping[str, Function]:
    """Differentiable functions of torch that treat each element alone, by name."""
    stored: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    named = {
        name: getattr(functional if name.startswith("nn.") else torch, name.rpartition(".")[2], None)
        for name, entry in stored.items()
        if entry["family"] == "unary" and entry.get("floating", {}).get("gradients") and name not in FURTHER
    }
    return {name: function for name, function in named.items() if isinstance(function, Callable)} | {
        text: optioned(text) for text in ENDS.replace("\n", " ").split("; ")
    }


FURTHER = frozenset({"nn.functional.prelu", "nn.functional.threshold", "nn.functional.rrelu", "fill", "frexp"})
"""Unary operators with further arguments that have no default, or with two results."""
ROW = len(SPECIAL)


def _slopes(function: Function, x: Tensor) -> Tensor:
    result: Tensor = torch.func.grad(lambda y: function(y).sum())(x)
    return result


def _together(function: Function, x: Tensor) -> list[Tensor]:
    """Results of a row, and of two rows with a gap in memory between them."""
    return [function(x[0, :ROW]), function(x[:, :ROW])]


def _one_by_one(function: Function, x: Tensor) -> list[Tensor]:
    rows = torch.cat([function(x[:, place : place + 1]) for place in range(ROW)], 1)
    return [rows[0], rows]


def _elements(parts: Collected) -> None:
    x = torch.tensor((SPECIAL * 2)[:24]).repeat(2, 1)
    for name, function in elementwise().items():
        for label, chosen in ((name, function), (f"gradient of {name}", partial(_slopes, function))):
            parts.add(label, Known(partial(_together, chosen), partial(_one_by_one, chosen)), x)


REDUCTIONS = """amax amin argmax argmin max min aminmax sum mean prod nansum nanmean median nanmedian cummax cummin cumsum
cumprod logcumsumexp logsumexp softmax log_softmax any all count_nonzero sort argsort norm std var std_mean var_mean"""
PAIRS = "maximum minimum fmax fmin clamp_min clamp_max eq ne lt ge isclose logaddexp hypot atan2 copysign fmod remainder mul"
EMPTY = """sum mean prod nansum nanmean logsumexp any all count_nonzero std var std_mean var_mean cumsum cumprod softmax sort
norm"""
"""Reductions that are defined for no numbers."""
SIGNED = "clone neg abs round trunc ceil floor frac relu sqrt sin tanh asinh expm1 sign reciprocal square"
WINDOWS: Mapping[str, Function] = {
    "max_pool1d": partial(functional.max_pool1d, kernel_size=2),
    "max_pool1d, overlapping": partial(functional.max_pool1d, kernel_size=3, stride=1, padding=1),
    "max_pool2d": lambda x: functional.max_pool2d(x[None], 3, 2),
    "max_pool3d": lambda x: functional.max_pool3d(x[None, None], (1, 2, 3)),
    "adaptive_max_pool1d": partial(functional.adaptive_max_pool1d, output_size=4),
    "avg_pool1d": partial(functional.avg_pool1d, kernel_size=3),
    "scatter_reduce, amax": lambda x: x[0].scatter_reduce(0, torch.arange(19) % 5, x[1], "amax"),
    "index_reduce, amin": lambda x: x.index_reduce(0, torch.tensor([0, 1, 1]), x[1:4], "amin"),
    "where": lambda x: torch.where(x > 0, x, -1.0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "topk": lambda x: x.topk(3, -1),
    "kthvalue": lambda x: x.kthvalue(19, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (19,)),
    "nearest": lambda x: functional.interpolate(x[None], scale_factor=1.5),
    "to bool": lambda x: x.bool(),
}


def _special(parts: Collected) -> None:
    x = normal(parts.generator, 6, 19)
    x[1, 3], x[2, 17], x[3, 5], x[4, 6], x[4, 9], x[5, 0] = NAN, NAN, INF, INF, -INF, NAN
    for name in REDUCTIONS.split():
        for dim in (0, 1):
            parts.add(f"{name} over {dim}", partial(getattr(torch, name), dim=dim), x)
    for name in PAIRS.split():
        parts.add(name, lambda x, name=name: getattr(torch, name)(x, x.roll(1, 1)), x)
    for name, function in WINDOWS.items():
        parts.add(name, function, x)
    for name in EMPTY.split():
        for label, shape in {"column": (0, 3), "row": (3, 0)}.items():
            parts.add(f"{name} of an empty {label}", partial(getattr(torch, name), dim=0), torch.zeros(shape))


def _signs(parts: Collected) -> None:
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0] * 5)[:19].repeat(2, 1)
    others = torch.tensor([0.0, 0.0, -0.0, -0.0] * 5)[:19].repeat(2, 1)

    def add(label: str, function: Function, *tensors: Tensor) -> None:
        signs = partial(_signs_of, function)
        parts.add(label, Known(signs, signs), *tensors)  # without rounding errors, which change signs of zeros

    for name in SIGNED.split():
        add(name, getattr(torch, name), zeros)
    for name in PAIRS.split():
        add(name, getattr(torch, name), zeros, others)
    for name in ("sum", "prod", "cumsum", "amax", "amin"):
        add(f"{name} of rows", partial(getattr(torch, name), dim=0), zeros)


def _signs_of(function: Function, *tensors: Tensor) -> Tensor:
    result = function(*tensors)
    return sign_of(result) if result.is_floating_point() else result


WORKLOADS = (
    family("values-special", "Reductions, comparisons and windows of NaN beside numbers, and of nothing.", _special),
    family("values-signs", "Signs of zeros that operators give.", _signs, traits=KNOWN),
    family(
        "known-elements",
        "Functions of one argument, and their gradients, which are those of each element alone.",
        _elements,
        techniques=KERNELS,
        traits=KNOWN,
    ),
)
