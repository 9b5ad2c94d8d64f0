"""Samples of what a correct implementation of a precision computes: the FP64 oracle with random rounding errors.

Monte Carlo arithmetic (D. S. Parker, UCLA CSD-970002, 1997): every operator's result is multiplied by 1 + e with e drawn
uniformly from the rounding error that the precision allows. The spread of the final results is then what any correct
implementation may show, with the conditioning of this very workload and these very inputs in it, forward and backward.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import ValuesView
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.verify import noise
from accelcheck.verify.noise import Sums
from accelcheck.verify.precision import ACCUMULATOR, INEXACT_ULPS, SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.workloads.draw import factor_of, fractions, of_mantissas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

EXACT = frozenset(
    [
        "_to_copy",
        "alias_copy",
        "abs",
        "amax",
        "amin",
        "aminmax",
        "cat",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "constant_pad_nd",
        "contiguous",
        "copy",
        "copy_",
        "detach",
        "diagonal_copy",
        "embedding",
        "expand_copy",
        "eye",
        "fill",
        "fill_",
        "flip",
        "fmax",
        "fmin",
        "gather",
        "hardtanh",
        "hardtanh_backward",
        "index",
        "index_put",
        "index_put_",
        "index_select",
        "isnan",
        "leaky_relu",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "masked_select",
        "max",
        "max_pool2d_with_indices",
        "maximum",
        "min",
        "minimum",
        "neg",
        "neg_",
        "new_empty_strided",
        "new_zeros",
        "permute_copy",
        "put",
        "relu",
        "relu_",
        "repeat",
        "repeat_interleave",
        "roll",
        "round",
        "scatter",
        "scatter_",
        "select_backward",
        "select_scatter",
        "sign",
        "slice_backward",
        "slice_scatter",
        "sort",
        "split_copy",
        "stack",
        "take",
        "threshold",
        "threshold_backward",
        "topk",
        "tril",
        "triu",
        "unfold",
        "where",
        "zero",
        "zero_",
        "unsqueeze_copy",
        "view_copy",
        "as_strided_scatter",
        "native_dropout_backward",
        "lift_fresh",
        "lift_fresh_copy",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_full",
        "new_ones",
        "new_empty",
        "_unsafe_index",
        "_reshape_copy",
        "_unsafe_view",
        "resize_",
        "set_",
        "_local_scalar_dense",
    ]
)
"""Operators that only move, select, compare or negate: they never round."""

CORRECTLY_ROUNDED = frozenset(
    [
        "add",
        "add_",
        "sub",
        "sub_",
        "rsub",
        "mul",
        "mul_",
        "div",
        "div_",
        "sqrt",
        "sqrt_",
        "square",
        "lerp",
        "lerp_",
        "addcmul",
        "addcmul_",
        "addcdiv",
        "addcdiv_",
        "sum",
        "mean",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "convolution_backward",
        "dot",
        "mv",
        "cumsum",
        "reciprocal",
        "index_add",
        "index_add_",
        "scatter_add",
        "embedding_dense_backward",
        "nll_loss_forward",
        "nll_loss_backward",
        "nll_loss2d_forward",
        "nll_loss2d_backward",
        "mse_loss",
        "mse_loss_backward",
        "avg_pool2d",
        "avg_pool2d_backward",
        "linear",
    ]
)

CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "dot", "mv", "linear"}
)
"""Operators whose operands are rounded to the arithmetic precision before they are multiplied."""


SMALL = 2**15
"""Elements up to which NumPy is faster than torch: where time goes into calls."""
_TINY = 2.0**-1022
_FRACTION = 2**52 - 1
_HALF = 1022 << 52
"""Of FP64: the smallest normal number, the bits of the fraction, and those of 0.5."""


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Within it, FP64 operators return what an implementation in `precision` might.

    Args:
        precision: A key of `UNIT_ROUNDOFF`: what results are rounded to.
        storage: A key of `UNIT_ROUNDOFF`: what tensors are stored in. Where it is finer than `precision` (autocast,
            TF32), the operands of contractions are rounded too, and so are those results only that come from them or
            from operators that autocast may run in the lower precision.
        generator: A CPU generator, the only source of randomness.
    """

    def __init__(self, precision: str, storage: str, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.precision = precision
        self.storage = storage
        self.generator = generator

    @contextlib.contextmanager
    def at(self, precision: str) -> Iterator[None]:
        """Another precision for a while: the optimizer's step runs in the storage dtype under autocast too."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, moves, written = _facts(func)
        if (moves and not _accumulates(name, args, kwargs)) or not _has_float((args, kwargs.values())):
            return func(*args, **kwargs)
        unit = UNIT_ROUNDOFF[self.precision]
        if name in CONTRACTIONS and unit > UNIT_ROUNDOFF[self.storage]:
            args = tuple(self._rounded(a, unit) if _is_float(a) else a for a in args)
        if name in _COMPOSED and self.precision != "float64":
            # What they compute first errs in the accumulator's precision, and what follows magnifies that: the mean that
            # is subtracted by mean / deviation, the exponential in a tail by its argument.
            args = (self._rounded(args[0], INEXACT_ULPS * UNIT_ROUNDOFF[ACCUMULATOR]), *args[1:])
        hits = _hits(func, name, args)
        squares = _sums_of_squares(func, name, args, kwargs)
        sequential = _sequential_errors(name, args, kwargs) if self.precision != "float64" else {}
        out = func(*args, **kwargs)
        rounded = unit if name in CORRECTLY_ROUNDED or name in _SCATTERS else 2 * INEXACT_ULPS * unit
        if self.precision == "tf32":
            # Only products see TF32: everything else, accumulation and results included, is FP32.
            rounded = UNIT_ROUNDOFF["float32"] * rounded / unit
        results = _outputs(out) if written is None else _written(written, args, kwargs)
        lengths = _reduction_lengths(name, args, results) if hits is None else (hits,)
        for position, tensor in enumerate([*results, *_unannounced(name, args)]):
            if tensor is None:
                continue
            length = lengths[min(position, len(lengths) - 1)]
            self._perturb_(tensor, rounded, length, squares[position] if position < len(squares) else None)
            if position in sequential:
                tensor.add_(sequential[position].reshape(tensor.shape))
        return out

    def _perturb_(self, tensor: Tensor, unit: float, length: int | Tensor, squares: Tensor | None = None) -> None:
        if tensor.numel() == 0:
            return
        if _by_numpy(tensor):
            self._perturb_array_(tensor, unit, length, squares)
            return
        # Near 0 the spacing stays, and rounding never passes 0: what is below half of it becomes 0, or stays where it was
        # held in a wider register. So 0 stays 0, and squares do not turn negative.
        half = SMALLEST_SUBNORMAL[self.precision] / 2
        sums = self._sums(tensor, length, squares) if isinstance(length, Tensor) or length > 1 else None
        factors = [factor_of(self.generator) for _ in range(1 if sums is None else 3)]
        if noise.perturb_(tensor, factors, unit, half, sums):
            return
        sizes, chance = tensor.abs(), _uniform(tensor, factors[0])
        flushed = torch.where(chance > 0, tensor.neg(), 0.0)
        change = torch.where(sizes < half, flushed, (sizes * unit).clamp_(min=half).mul_(chance))
        if sums is not None:
            size = sums.deviation(tensor)
            for factor in factors[1:]:
                change += _uniform(tensor, factor) * size
        if not math.isfinite(float(change.sum())):
            change = torch.where(torch.isfinite(change), change, 0.0)  # of NaN and infinities
        tensor.add_(change)

    def _perturb_array_(self, tensor: Tensor, unit: float, length: int | Tensor, squares: Tensor | None) -> None:
        """`_perturb_` to the same bits, for tensors so small that calls cost more than numbers: NumPy's cost a fifth of torch's."""
        array = tensor.detach().reshape(-1).numpy()
        half = SMALLEST_SUBNORMAL[self.precision] / 2
        with np.errstate(all="ignore"):  # NaN and infinities are legal
            sizes = np.abs(array)
            least, finite = sizes.min(), bool(sizes.max() < math.inf)  # not where there is a NaN: it is the largest
            mantissas = _mantissas(sizes, normal=finite and least >= _TINY)
            chance = self._uniform_of(mantissas, finite=finite)
            change = sizes * unit
            np.maximum(change, half, out=change)
            change *= chance
            if least < half or not finite:
                np.copyto(change, np.where(chance > 0, -array, 0.0), where=sizes < half)
            if isinstance(length, Tensor) or length > 1:
                size = self._sums(tensor, length, squares).deviation(tensor).reshape(-1).numpy()
                change += self._uniform_of(mantissas, finite=finite) * size
                change += self._uniform_of(mantissas, finite=finite) * size
            if not (finite and math.isfinite(change.sum())):
                change[~np.isfinite(change)] = 0.0
            array += change

    def _sums(self, sums: Tensor, length: int | Tensor, squares: Tensor | None) -> Sums:
        unit = UNIT_ROUNDOFF["float64" if self.precision == "float64" else ACCUMULATOR]
        scale = unit**2 / 12  # the variance of either uniform number is 1 / 3
        if squares is not None:
            return Sums(scale, length, squares)
        squares = sums.square().mean()
        if not math.isfinite(float(squares)):
            squares = torch.where(torch.isfinite(sums), sums, 0.0).square().mean()
        return Sums(scale, length, squares, squares.sqrt())

    def _rounded(self, tensor: Tensor, unit: float) -> Tensor:
        factor = factor_of(self.generator)
        found = None if _by_numpy(tensor) else noise.rounded(tensor, factor, unit)
        return tensor * (1 + unit * _uniform(tensor, factor)) if found is None else found

    def _uniform_of(self, mantissas: Any, *, finite: bool) -> Any:
        """`_uniform` of an array, given the mantissas of its magnitudes."""
        chance = of_mantissas(self.generator, mantissas, finite=finite)
        chance *= 2
        chance -= 1
        return chance


class Nearest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Within it, every FP64 operator's result is the nearest number of a dtype: correct rounding, step by step.

    Uniform errors do not show what rounding does on a grid: to add a constant may move all elements by the same part of a
    unit, and an update below half a unit is lost each time. An implementation that rounds correctly leans so.

    Args:
        dtype: Of the results.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, moves, written = _facts(func)
        out = func(*args, **kwargs)
        if (moves and not _accumulates(name, args, kwargs)) or not _has_float((args, kwargs.values())):
            return out
        results = _outputs(out) if written is None else _written(written, args, kwargs)
        for tensor in [*results, *_unannounced(name, args)]:
            if tensor is not None:
                tensor.copy_(tensor.to(self.dtype))
        return out


def _uniform(tensor: Tensor, factor: float) -> Tensor:
    return fractions(tensor, factor).mul_(2).sub_(1)


def _mantissas(sizes: Any, *, normal: bool) -> Any:
    """As ``np.frexp`` of magnitudes, which takes longer than to set the exponents where all numbers are normal."""
    if normal:
        return ((sizes.view(np.int64) & _FRACTION) | _HALF).view(np.float64)
    return np.frexp(sizes)[0]


def _by_numpy(tensor: Tensor) -> bool:
    return tensor.numel() <= SMALL and tensor.dtype == torch.float64 and tensor.is_contiguous()


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floats(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _floats(value)
        elif _is_float(value):
            found.append(value)
    return found


def _has_float(values: Iterable[Any]) -> bool:
    return any(
        value.is_floating_point()
        if isinstance(value, Tensor)
        else isinstance(value, (tuple, list, ValuesView)) and _has_float(value)
        for value in values
    )


def _outputs(out: Any) -> list[Tensor | None]:
    """Outputs in their places; None for those that were not asked for or are no floating-point tensors."""
    return [value if _is_float(value) else None for value in (out if isinstance(out, (tuple, list)) else (out,))]


@functools.cache
def _facts(func: Any) -> tuple[str, bool, tuple[tuple[int, str], ...] | None]:
    """An operator's name without namespace and overload, whether it only moves or selects, and the arguments that it writes to.

    Those are given by position and name; None where it writes to none.
    """
    name = func.name().partition(".")[0].rpartition("::")[2]
    schema = func._schema  # noqa: SLF001 - OpOverload has no public schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return name, func.is_view or name in EXACT, written if schema.is_mutable else None


def _written(which: Iterable[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    return [*_floats(args[position] if position < len(args) else kwargs.get(name) for position, name in which)]


def _unannounced(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that an operator writes although its schema does not say so: batch norm's running statistics in training."""
    if name == "native_batch_norm" and args[5]:
        return _floats(args[3:5])
    return []


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an otherwise exact operator adds: `index_put` with `accumulate`."""
    return name in {"index_put", "index_put_"} and bool(kwargs.get("accumulate", len(args) > 3 and args[3]))


def _sums_of_squares(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """The sum of the squared terms of each element, by output: what a sum makes of the squares of what it sums.

    Empty for operators that are no sums, or that do not show what they sum.
    """
    if name in _POOLS:
        return [_pooled_squares(name, args)]
    if (name not in _SUMS and name not in _SCATTERS) or "out" in kwargs:  # which would be overwritten
        return []
    squared = tuple(a.square() if _is_float(a) else a for a in args)
    factors = {key: value**2 if key in _FACTORS else value for key, value in kwargs.items()}
    found = _outputs(func(*squared, **factors))
    if name == "mean":
        return [None if q is None else q / max(1, args[0].numel() // max(1, q.numel())) for q in found]
    return found


def _pooled_squares(name: str, args: tuple[Any, ...]) -> Tensor:
    """The sum of the squared terms of average pooling: of ``x / n`` forward, with n the elements of a window, of ``grad / n`` backward."""
    backward = name.endswith("backward")
    x, settings = args[int(backward)], [*args[2 if backward else 1 :]]
    settings += [(), 0, False, True, None][
        len(settings) - 1 :
    ]  # of the schema: stride, padding, ceil mode, padding counts, divisor
    kernel, stride, padding, ceil, counted, divisor = settings
    window = (kernel, stride, padding, ceil)
    counts = divisor or torch.ops.aten.avg_pool2d(torch.ones_like(x), *window, True, 1)  # noqa: FBT003 - an operator of torch
    if counted and not divisor:
        counts = _size(kernel)
    if backward:
        square: Tensor = torch.ops.aten.avg_pool2d_backward((args[0] / counts).square(), x, *window, True, 1)  # noqa: FBT003 - as above
        return square
    total: Tensor = torch.ops.aten.avg_pool2d(x.square(), *window, True, 1) / counts**2  # noqa: FBT003 - as above
    return total


def _pair(sides: Any) -> tuple[int, int]:
    """Two numbers that may be given as one."""
    listed = [sides] if isinstance(sides, int) else [*sides]
    return listed[0], listed[-1]


def _size(kernel: Any) -> int:
    """Elements of a window."""
    return math.prod(_pair(kernel))


def _sequential_errors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
    """The actual error of summing these terms one after the other in the accumulator's precision, by output.

    Terms that repeat, as the gradient of a mean does, round the same way each time: the error grows with K, not with its
    square root, and no statistical model of K shows it. Sequential sums are as correct as any other order.
    """
    if name == "sum" and len(args) > 1 and args[1]:
        return {0: _sequential_error(args[0], args[1], keep=bool(args[2]) if len(args) > 2 else False)}
    if name == "mean" and len(args) > 1 and args[1]:
        count = math.prod(args[0].shape[d] for d in args[1])
        return {0: _sequential_error(args[0], args[1], keep=bool(args[2]) if len(args) > 2 else False) / max(1, count)}
    if name == "native_batch_norm" and args[5] and args[0].dim() > 1:
        return _statistics_errors(args[0], args[1], float(args[7]))
    if name == "convolution_backward":
        grad = args[0]
        return {2: _sequential_error(grad, [d for d in range(grad.dim()) if d != 1])} if args[-1][2] else {}
    if name == "native_batch_norm_backward" and args[0].dim() > 1:
        grad = args[0]
        over = [d for d in range(grad.dim()) if d != 1]
        found = {2: _sequential_error(grad, over)}
        if (args[7] if len(args) > 7 else kwargs["train"]) and _is_float(args[5]):
            shape = [1, -1, *[1] * (grad.dim() - 2)]
            normal = (args[1] - args[5].reshape(shape)) * args[6].reshape(shape)
            found[1] = _sequential_error(grad * normal, over)
            scale = args[6] if args[2] is None else args[6] * args[2]
            both = found[2].reshape(shape) + normal * found[1].reshape(shape)
            found[0] = -scale.reshape(shape) * both / max(1, grad.numel() // max(1, grad.shape[1]))
        return found
    return {}


def _statistics_errors(x: Tensor, weight: Tensor | None, eps: float) -> dict[int, Tensor]:
    """The same of batch norm's mean and variance in training: in its output, the mean, and one over the deviation."""
    over = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = max(1, x.numel() // max(1, x.shape[1]))
    centred = x - x.mean(over, keepdim=True)
    mean = _sequential_error(x, over) / count
    variance = _sequential_error(centred.square(), over) / count
    inverse = (centred.square().mean(over) + eps).rsqrt()
    deviation = -0.5 * inverse**3 * variance
    out = centred * deviation.reshape(shape) - (mean * inverse).reshape(shape)
    return {0: out if weight is None else out * weight.reshape(shape), 1: mean, 2: deviation}


def _sequential_error(terms: Tensor, over: list[int], *, keep: bool = False) -> Tensor:
    dims = sorted(d % max(1, terms.dim()) for d in over)
    kept = [d for d in range(terms.dim()) if d not in dims]
    rows = terms.detach().permute(*kept, *dims).reshape([terms.shape[d] for d in kept] + [-1])
    if rows.shape[-1] == 0 or rows.numel() == 0:
        return torch.zeros(rows.shape[:-1], dtype=terms.dtype)
    # NumPy, since torch.cumsum on the CPU adds up float32 in float64.
    single = rows.to(getattr(torch, ACCUMULATOR)).numpy()
    total = torch.from_numpy(np.add.accumulate(single, axis=-1)[..., -1].copy())
    error = total.to(terms.dtype) - torch.from_numpy(single).to(terms.dtype).sum(-1)
    return error.reshape([1 if d in dims else n for d, n in enumerate(terms.shape)]) if keep else error


def _reduction_lengths(name: str, args: tuple[Any, ...], results: list[Tensor | None]) -> tuple[int, ...]:
    """How many terms are summed for each element, by output; the last number holds for all further ones."""
    floats = _floats(args)
    if not floats or not results or results[0] is None:
        lengths = _contracted(name, floats, args)
    elif "norm" in name and name.startswith(("native_", "_native_")):
        lengths = _normalised(name, floats, args)
    elif name in {"nll_loss_forward", "nll_loss2d_forward"}:
        lengths = (args[1].numel() // max(1, results[0].numel()),)
    elif name == "avg_pool2d":
        lengths = (_size(args[1]),)
    elif name == "avg_pool2d_backward":
        strides = args[3] or args[2]
        # Each quotient is rounded too: another variance of u^2 Q / 3.
        lengths = (_size([-(-side // step) for side, step in zip(_pair(args[2]), _pair(strides), strict=True)]) + 6,)
    elif name in _REDUCTIONS:
        lengths = (floats[0].numel() // max(1, results[0].numel()),)
    elif "softmax" in name and floats[0].dim():
        lengths = (floats[0].shape[args[2] if "backward" in name else args[1]],)
    elif name in {"cumsum", "logsumexp"} and floats[0].dim():
        lengths = (floats[0].shape[-1],)
    else:
        lengths = _contracted(name, floats, args)
    return tuple(max(1, length) for length in lengths)


def _contracted(name: str, floats: list[Tensor], args: tuple[Any, ...]) -> tuple[int, ...]:
    if name in {"mm", "bmm", "mv", "dot", "linear"}:
        return (floats[0].shape[-1],)
    if name in {"addmm", "baddbmm"}:
        return (floats[1].shape[-1],)
    if name == "convolution":
        return (floats[1][0].numel(),)
    if name == "convolution_backward":
        grad, weight, groups = floats[0], floats[2], args[9]
        over_weight = grad.numel() // max(1, grad.shape[1])
        return (weight.numel() // max(1, weight.shape[1] * groups), over_weight, over_weight)
    return (1,)


def _normalised(name: str, floats: list[Tensor], args: tuple[Any, ...]) -> tuple[int, ...]:
    first, backward = floats[0], name.endswith("backward")
    if "batch_norm" in name:
        # Without statistics of the batch each element stands alone; the gradients of weight and bias never do.
        over = first.numel() // max(1, first.shape[1])
        return (over if _trains(name, args) else 1, over, over)
    if "layer_norm" in name:
        normal = math.prod(args[2 if backward else 1])
        rows = first.numel() // max(1, normal)
        return (normal, rows if backward else normal)
    group = first[0].numel() // max(1, args[8 if backward else 6]) if len(first) else 1
    return (group, first.numel() // max(1, first.shape[1]) if backward else group)


def _trains(name: str, args: tuple[Any, ...]) -> bool:
    """Whether batch norm takes the statistics of the batch."""
    if name.endswith("backward"):
        return bool(args[7])
    return name != "_native_batch_norm_legit_no_training" and bool(args[5])


def _hits(func: Any, name: str, args: tuple[Any, ...]) -> Tensor | None:
    """How many terms each element gets from an operator that scatters and adds: what it makes of zeros and ones."""
    if name not in _SCATTERS:
        return None
    filled = [torch.ones_like(value) if _is_float(value) else value for value in args]
    if name == "embedding_dense_backward":
        filled[4] = False  # scaled by frequency, every count would be 1
    else:
        filled[0] = torch.zeros_like(args[0])
    counts: Tensor = func(*filled)
    return counts


_POOLS = frozenset({"avg_pool2d", "avg_pool2d_backward"})
_COMPOSED = frozenset(
    [
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "gelu",
        "silu",
        "_softmax",
        "_log_softmax",
    ]
)
_SUMS = CONTRACTIONS | {"sum", "mean", "cumsum"}
"""Operators whose every output is a sum of products of their operands; `_SCATTERS` are too."""
_FACTORS = frozenset({"alpha", "beta"})
_REDUCTIONS = frozenset(["sum", "mean", "var", "var_mean", "std", "linalg_vector_norm", "norm", "mse_loss"])
_SCATTERS = frozenset(
    [
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put",
        "embedding_dense_backward",
    ]
)
