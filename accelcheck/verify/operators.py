"""Operators of torch: which of them round, and the tensors that they take, return and write to."""

from __future__ import annotations

import functools
from collections.abc import ValuesView
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

EXACT = frozenset(
    """abs alias_copy amax amin aminmax as_strided_scatter cat clamp clamp_max clamp_min clone constant_pad_nd
    contiguous copy copy_ detach diagonal_copy embedding empty_like expand_copy eye fill fill_ flip fmax fmin
    full_like gather hardtanh hardtanh_backward index index_put index_put_ index_select isnan leaky_relu lift_fresh
    lift_fresh_copy _local_scalar_dense masked_fill masked_fill_ masked_scatter masked_select max
    max_pool2d_with_indices maximum min minimum native_dropout_backward neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros ones_like permute_copy put relu relu_ repeat repeat_interleave _reshape_copy resize_ roll round
    scatter scatter_ select_backward select_scatter set_ sign slice_backward slice_scatter sort split_copy stack take
    threshold threshold_backward _to_copy topk tril triu unfold _unsafe_index _unsafe_view unsqueeze_copy view_copy
    where zero zero_ zeros_like""".split()
)
"""Operators that only move, select, compare or negate: they never round."""

CORRECTLY_ROUNDED = frozenset(
    """add add_ addcdiv addcdiv_ addcmul addcmul_ addmm avg_pool2d avg_pool2d_backward baddbmm bmm convolution
    convolution_backward cumsum div div_ dot embedding_dense_backward index_add index_add_ lerp lerp_ linear mean mm
    mse_loss mse_loss_backward mul mul_ mv nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
    reciprocal rsub scatter_add sqrt sqrt_ square sub sub_ sum""".split()
)
"""Operators whose results err by their rounding alone, and by the accumulation of a sum."""

INEXACT = frozenset(
    """abs_ acos acosh asin asinh atan atan2 atanh binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits _cdist_backward _cdist_forward celu cos cosh cumprod digamma elu elu_backward erf
    erfc erfinv exp exp2 expm1 frac_ frexp _fused_rms_norm _fused_rms_norm_backward gelu gelu_backward hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward huber_loss huber_loss_backward hypot lgamma linalg_qr
    linalg_vector_norm log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward _log_softmax
    _log_softmax_backward_data logaddexp logaddexp2 logcumsumexp logsumexp mish mish_backward nan_to_num_
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward norm pow prod rsqrt
    _safe_softmax sigmoid sigmoid_backward silu silu_backward sin sinh smooth_l1_loss smooth_l1_loss_backward
    soft_margin_loss soft_margin_loss_backward _softmax _softmax_backward_data softplus softplus_backward std std_mean
    tan tanh tanh_backward var var_mean""".split()
)
"""Transcendental, normalizing and fused operators: their results may err by `accelcheck.verify.precision.INEXACT_ULPS`.

``abs_``, ``frac_``, ``frexp`` and ``nan_to_num_`` are exact, and are here since the budgets of emulated int8 were measured so.
"""

CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "dot", "mv", "linear"}
)
"""Operators whose operands are rounded to the arithmetic precision before they are multiplied."""

SCATTERS = frozenset(
    """embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl_ scatter_add scatter_add_
    _unsafe_index_put""".split()
)
"""Operators that add to places that an index gives."""

COMPOSED = frozenset(
    """gelu _log_softmax native_batch_norm _native_batch_norm_legit native_group_norm native_layer_norm silu _softmax""".split()
)
"""Operators that compute with a rounded intermediate: a mean that is subtracted, the argument of an exponential."""


class OperatorFacts(NamedTuple):
    """What an operator's schema says.

    Attributes:
        name: Without overload; with the namespace where that is not torch's own, whose operators alone are listed here.
        moves: Whether it only moves or selects.
        written: Position and name of the arguments that it writes to; None where it writes to none.
    """

    name: str
    moves: bool
    written: tuple[tuple[int, str], ...] | None


@functools.cache
def facts(func: Any) -> OperatorFacts:
    """OperatorFacts of an overload of an operator."""
    name = func.name().partition(".")[0].removeprefix("aten::")
    schema = func._schema  # noqa: SLF001 - OpOverload has no public schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperatorFacts(name, func.is_view or name in EXACT, written if schema.is_mutable else None)


def may_round(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call may round: not where it only moves numbers, or has none in floating point."""
    name, moves, _ = facts(func)
    return (not moves or _accumulates(name, args, kwargs)) and _has_float((args, kwargs.values()))


def classified(name: str) -> bool:
    """Whether it is known how much an operator rounds. Others are granted what those of `INEXACT` are."""
    return name in CORRECTLY_ROUNDED or name in SCATTERS or name in INEXACT or name.removesuffix("_") in INEXACT


def results(func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Tensors that a call returned or wrote to; None for those that were not asked for or are not in floating point."""
    name, _, written = facts(func)
    if written is None:
        returned = outputs(out)
    else:
        values = (args[position] if position < len(args) else kwargs.get(name) for position, name in written)
        returned = [*floats(values)]
    return [*returned, *_unannounced(name, args)]


def outputs(out: Any) -> list[Tensor | None]:
    """Outputs in their places; None for those that were not asked for or are not in floating point."""
    return [value if is_float(value) else None for value in (out if isinstance(out, (tuple, list)) else (out,))]


def floats(values: Iterable[Any]) -> list[Tensor]:
    """The floating-point tensors among nested values."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            tensors += floats(value)
        elif is_float(value):
            tensors.append(value)
    return tensors


def is_float(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_float(values: Iterable[Any]) -> bool:
    return any(
        value.is_floating_point()
        if isinstance(value, Tensor)
        else isinstance(value, (tuple, list, ValuesView)) and _has_float(value)
        for value in values
    )


def _unannounced(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that an operator writes although its schema does not say so: batch norm's running statistics in training."""
    if name == "native_batch_norm" and args[5]:
        return floats(args[3:5])
    return []


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an otherwise exact operator adds: `index_put` with `accumulate`."""
    return name in {"index_put", "index_put_"} and bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
