"""Terms that operators sum for each element of a result: their number, and the sum of their squares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accelcheck.devices.layouts import entries, sparse
from accelcheck.verify import operators
from accelcheck.verify.operators import CONTRACTIONS, SCATTERS, floats, has_complex, is_float, outputs
from accelcheck.verify.precision import ACCUMULATOR, SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.workloads.base import is_inexact

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Lengths = tuple[int, ...]

_POOLS = frozenset({"avg_pool2d", "avg_pool2d_backward"})
_POOLING: tuple[Any, ...] = ((), 0, False, True, None)
"""Defaults of average pooling: stride, padding, ceil mode, whether padding counts, divisor."""
_SPARSE_SUMS = frozenset({"_coalesce", "_sparse_sum", "_to_dense"})
_SUMS = CONTRACTIONS | _SPARSE_SUMS | {"sum", "nansum", "mean", "cumsum", "_trilinear", "col2im"}
"""Operators with outputs that are sums of products of their operands, besides those of `SCATTERS`."""
_PRODUCTS = frozenset({"prod", "cumprod"})
"""Operators that multiply K factors. Each product is rounded: the error's variance is u^2 K P^2 / 3, that of `Sums`
with S = P and Q = 4 P^2. If each factor occurs R times, lanes of a vector and branches of a tree hold the same partial
products, whose errors are one error: the variance is up to R times that, which Q = (6 R - 2) P^2 gives. Partial
products that underflow do not fall below the smallest number d while factors are at least 1 / 2: 6 d^2 / (K u^2) of Q
gives the result an error of d."""
_FACTORS = frozenset({"alpha", "beta"})


def hits(func: Any, name: str, args: tuple[Any, ...]) -> Tensor | None:
    """Number of terms that an operator scatters and adds to each element: its result of zeros and ones."""
    if name not in SCATTERS:
        return None
    filled = [torch.ones_like(value) if is_inexact(value) else value for value in args]
    if name == "embedding_dense_backward":
        filled[4] = False  # scaled by frequency, every count would be 1
    else:
        filled[0] = torch.zeros_like(args[0])
    counts: Tensor = func(*filled)
    return counts.abs() if counts.is_complex() else counts


def squares(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Sum of the squared terms of each element, by output: the operator's own sum of squares.

    Empty for operators that are no sums, or that do not show their terms.
    """
    if name in _POOLS:
        return [_pooled_squares(name, args)]
    if name == "var_mean" and not has_complex(args):
        mean = outputs(func(args[0].square(), *args[1:], **kwargs))[1]  # of squares
        return [None, None if mean is None else mean * (mean.numel() / max(1, args[0].numel()))]
    if name in _PRODUCTS and "out" not in kwargs and not has_complex(args):
        x, dim = args[0], args[1] if len(args) > 1 else None
        return [None if out is None else _product_squares(x, dim, out) for out in outputs(func(*args, **kwargs))]
    if (name not in _SUMS and name not in SCATTERS) or "out" in kwargs or has_complex(args):  # out would be overwritten
        return []
    squared = tuple(_squared(a) if is_float(a) else a for a in args)
    factors = {key: value**2 if key in _FACTORS else value for key, value in kwargs.items()}
    sums = outputs(func(*squared, **factors))
    if name == "mean":
        return [None if q is None else q / max(1, args[0].numel() // max(1, q.numel())) for q in sums]
    return sums


def _product_squares(x: Tensor, dim: int | None, product: Tensor) -> Tensor:
    """Q of products of the factors along a dimension, or of all: see `_PRODUCTS`."""
    rows = x.reshape(-1) if dim is None or not x.dim() else x.movedim(dim, -1)
    if not rows.numel():
        return product.square()
    count, steps = rows.shape[-1], rows.abs().sort(-1).values.diff(dim=-1)
    repeated = count / (1.0 + (steps != 0).sum(-1, keepdim=True))
    repeated = repeated.movedim(-1, dim or 0) if rows.dim() == product.dim() else repeated.reshape(product.shape)
    underflow = 6 / count * (SMALLEST_SUBNORMAL[ACCUMULATOR] / UNIT_ROUNDOFF[ACCUMULATOR]) ** 2
    return (6 * repeated - 2) * product.square() + (product != 0).to(product.dtype) * underflow


def _squared(x: Tensor) -> Tensor:
    """Squares elements; of a sparse tensor each entry, also where two have the same place."""
    if not sparse(x):
        return x.square()
    copy = x.clone()
    entries(copy).square_()
    return copy


def _pooled_squares(name: str, args: tuple[Any, ...]) -> Tensor:
    """Sum of squared terms of average pooling: of ``x / n`` forward, of ``grad / n`` backward; n elements a window."""
    backward = name == "avg_pool2d_backward"
    x, settings = args[int(backward)], args[2 if backward else 1 :]
    kernel, stride, padding, ceil, counted, divisor = [*settings, *_POOLING[len(settings) - 1 :]]
    sums = kernel, stride, padding, ceil, True, 1  # padding counts, and the divisor is 1
    counts = divisor or (_size(kernel) if counted else torch.ops.aten.avg_pool2d(torch.ones_like(x), *sums))
    square: Tensor = (
        torch.ops.aten.avg_pool2d_backward((args[0] / counts).square(), x, *sums)
        if backward
        else torch.ops.aten.avg_pool2d(x.square(), *sums) / counts**2
    )
    return square


def lengths(name: str, args: tuple[Any, ...], results: Sequence[Tensor | None]) -> Lengths:
    """Number of terms summed for each element, by output; the last number holds for all further outputs."""
    rule, operands = _RULES.get(name), floats(args)
    result = results[0] if results else None
    if rule is None or not operands or (result is None and name not in CONTRACTIONS):
        return (1,)
    elements = 1 if result is None else max(1, result.numel())
    return tuple(max(1, length) for length in rule(_Call(operands, args, elements)))


class _Call(NamedTuple):
    """Call of an operator: its floating-point tensors, all arguments, and elements of the first result, at least 1."""

    operands: list[Tensor]
    args: tuple[Any, ...]
    elements: int


def _row(call: _Call) -> Lengths:
    x = call.operands[0]
    return (x.shape[-1] if x.dim() else 1,)


def _along(call: _Call) -> Lengths:
    """Terms, or factors, along the dimension of the second argument."""
    x = call.operands[0]
    return (x.shape[call.args[1]] if x.dim() else 1,)


def _reduced(call: _Call) -> Lengths:
    return (call.operands[0].numel() // call.elements,)


def _trilinear(call: _Call) -> Lengths:
    """Terms of a sum over dimensions, which skips those that a tensor lacks; two products round as six terms do."""
    shapes = [list(value.shape) for value in call.args[:3]]
    for shape, places in zip(shapes, call.args[3:6], strict=True):
        for place in places:
            shape.insert(place, 1)
    return (math.prod(max(shape[place] for shape in shapes) for place in call.args[6]) + 6,)


def _convolution_backward(call: _Call) -> Lengths:
    (grad, _, weight, *_), groups = call.operands, call.args[9]
    over = _over_channels(grad)
    return (weight.numel() // max(1, weight.shape[1] * groups), over, over)


def _pool_backward(call: _Call) -> Lengths:
    kernel, strides = call.args[2], call.args[3] or call.args[2]
    # Each quotient is rounded too: another variance of u^2 Q / 3.
    return (_size([-(-side // step) for side, step in zip(_pair(kernel), _pair(strides), strict=True)]) + 6,)


def _transformed(call: _Call) -> Lengths:
    """Stages of a Fourier transform, each with a rounded factor, whose error of 1.5 u^2 is six terms'."""
    x, dims = call.args[0], call.args[1]
    sides = [x.shape[dim] for dim in dims]
    if isinstance(call.args[-1], int) and not isinstance(call.args[-1], bool):  # of a real result
        sides[-1] = call.args[-1]
    return (6 * max(1, math.ceil(sum(map(_stages, sides)))),)


def _stages(side: int) -> float:
    """Stages along one side: log2 N, or those of Bluestein's three transforms of at least twice the size.

    Libraries take the latter for large prime factors: cuFFT beyond 127 (its documentation), MKL for 103 in 1030 and 191
    in 1528, whose errors are 3.8 u beside 1.9 u for 1024, and not for 61 in 976 (2.3 u).
    """
    rest = side = max(1, side)
    for factor in range(2, 64):
        while rest % factor == 0:
            rest //= factor
    return math.log2(side) if rest == 1 else 3 * math.log2(2 * side)


def _adaptive(call: _Call) -> Lengths:
    """Terms of the largest window, and a quotient, whose rounding is that of six terms."""
    sides = zip(call.operands[0].shape[::-1], call.args[1][::-1], strict=False)
    return (math.prod(-(-side // count) + 1 for side, count in sides if count) + 6,)


def _interpolated(call: _Call) -> Lengths:
    """Terms of an interpolation: up to eight neighbours of each position, for a gradient of each position there is."""
    return (8 * -(-call.operands[0].numel() // call.elements),)


def _batch_norm(call: _Call, *, trains: bool) -> Lengths:
    """Terms of a channel; the result has 1 without statistics of the batch, gradients of weight and bias have not."""
    over = _over_channels(call.operands[0])
    return (over if trains else 1, over, over)


def _layer_norm_backward(call: _Call) -> Lengths:
    normal = math.prod(call.args[2])
    return (normal, call.operands[0].numel() // max(1, normal))


def _group(x: Tensor, groups: int) -> int:
    return x[0].numel() // max(1, groups) if len(x) else 1


def _over_channels(x: Tensor) -> int:
    """Elements of one channel in all samples."""
    return x.numel() // max(1, x.shape[1])


def _pair(sides: Any) -> tuple[int, int]:
    """Converts a number or a sequence of one or two numbers to two."""
    listed = [sides] if isinstance(sides, int) else [*sides]
    return listed[0], listed[-1]


def _size(kernel: Any) -> int:
    """Elements of a window."""
    return math.prod(_pair(kernel))


_RULES: Mapping[str, Callable[[_Call], Lengths]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "linear", "_sparse_sparse_matmul"), _row),
    **dict.fromkeys(("cumsum", "cumprod"), _along),
    **dict.fromkeys(
        ("addmm", "addmv", "baddbmm", "_sparse_addmm", "sparse_sampled_addmm"),
        lambda call: (call.operands[1].shape[-1],),
    ),
    **dict.fromkeys(_SPARSE_SUMS, lambda call: (entries(call.operands[0]).numel(),)),
    "_trilinear": _trilinear,
    "col2im": lambda call: (_size(call.args[2]),),
    "addbmm": lambda call: (call.operands[1].shape[0] * call.operands[1].shape[-1],),
    "convolution": lambda call: (call.operands[1][0].numel(),),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        "sum nansum mean var var_mean std linalg_vector_norm norm mse_loss logsumexp prod".split(), _reduced
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), lambda call: (call.args[1].numel() // call.elements,)),
    **dict.fromkeys(operators.INTERPOLATED, _interpolated),
    **dict.fromkeys(operators.TRANSFORMS, _transformed),
    "avg_pool2d": lambda call: (_size(call.args[1]),),
    "avg_pool2d_backward": _pool_backward,
    "avg_pool3d": lambda call: (math.prod(call.args[1]) + 6,),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _adaptive),
    **dict.fromkeys(
        ("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "avg_pool3d_backward"), _interpolated
    ),
    # Those with a logarithm add the sum's error, whatever the results are: a mask may be as large as numbers get.
    **{name: _along for name in operators.NORMALISED if "log" not in name},
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        lambda call: (call.operands[0].shape[call.args[2]] if call.operands[0].dim() else 1,),
    ),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        lambda call: _batch_norm(call, trains=call.args[5]),
    ),
    "_batch_norm_with_update": lambda call: _batch_norm(call, trains=True),
    "_native_batch_norm_legit_no_training": lambda call: _batch_norm(call, trains=False),
    "native_batch_norm_backward": lambda call: _batch_norm(call, trains=call.args[7]),
    "native_layer_norm": lambda call: (math.prod(call.args[1]),),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": lambda call: (_group(call.operands[0], call.args[6]),),
    "native_group_norm_backward": lambda call: (
        _group(call.operands[0], call.args[8]),
        _over_channels(call.operands[0]),
    ),
}
"""Number of terms that an operator sums, by its name; absent ones sum none."""
