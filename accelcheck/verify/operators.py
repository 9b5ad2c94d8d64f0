"""Operators of torch: which of them round, and the tensors that they take, return and write to."""

from __future__ import annotations

import functools
import math
from collections.abc import ValuesView
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

EXACT = frozenset(
    [
        "_chunk_cat",
        "_unique2",
        "_unsafe_masked_index",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "as_strided_copy",
        "block_diag",
        "ceil",
        "ceil_",
        "channel_shuffle",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "copysign",
        "copysign_",
        "cummax",
        "cummin",
        "diag_embed",
        "diagonal_scatter",
        "diagonal_backward",
        "floor",
        "floor_",
        "floor_divide",
        "fmod",
        "frac",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "hardshrink",
        "hardshrink_backward",
        "heaviside",
        "im2col",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
        "kthvalue",
        "lu_unpack",
        "masked_scatter_",
        "masked_scatter_backward",
        "max_pool3d_with_indices",
        "max_unpool2d",
        "max_unpool3d",
        "median",
        "mode",
        "nan_to_num",
        "nanmedian",
        "narrow_copy",
        "nextafter",
        "pixel_shuffle",
        "pixel_unshuffle",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "resize_as_",
        "rot90",
        "searchsorted",
        "sgn",
        "softshrink_backward",
        "split_with_sizes_copy",
        "squeeze_",
        "squeeze_copy",
        "t_",
        "t_copy",
        "transpose_",
        "transpose_copy",
        "tril_",
        "triu_",
        "trunc",
        "trunc_",
        "unbind_copy",
        "unfold_copy",
        "unique_consecutive",
        "unique_dim",
        "unsafe_split",
        "unsqueeze_",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "bernoulli_",
        "normal",
        "randint_like",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "uniform_",
        "normal_",
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
        "addr",
        "addmv",
        "addbmm",
        "avg_pool3d",
        "avg_pool3d_backward",
        "remainder",
        "vdot",
        "trace",
        "deg2rad",
        "rad2deg",
        "col2im",
        "unfold_backward",
        "_prelu_kernel",
        "leaky_relu_backward",
        "ldexp",
        "nansum",
        "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward",
        "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward",
        "fractional_max_pool2d_backward",
        "fractional_max_pool3d_backward",
        "reflection_pad1d_backward",
        "reflection_pad2d_backward",
        "reflection_pad3d_backward",
        "replication_pad1d_backward",
        "replication_pad2d_backward",
        "replication_pad3d_backward",
        "upsample_nearest1d_backward",
        "upsample_nearest2d_backward",
        "upsample_nearest3d_backward",
        "_upsample_nearest_exact1d_backward",
        "_upsample_nearest_exact2d_backward",
        "_upsample_nearest_exact3d_backward",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d",
        "_adaptive_avg_pool3d_backward",
        "softshrink",
        "_unsafe_masked_index_put_accumulate",
        "histc",
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
"""Operators whose results err by their rounding alone, and by the accumulation of a sum."""

INEXACT = frozenset(
    [
        "_log_softmax",
        "_log_softmax_backward_data",
        "_safe_softmax",
        "_softmax",
        "_softmax_backward_data",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cos",
        "cosh",
        "sin",
        "sinh",
        "tan",
        "tanh",
        "tanh_backward",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log10",
        "log1p",
        "log2",
        "logaddexp",
        "logaddexp2",
        "logcumsumexp",
        "logsumexp",
        "pow",
        "rsqrt",
        "hypot",
        "erf",
        "erfc",
        "erfinv",
        "digamma",
        "lgamma",
        "elu",
        "elu_backward",
        "celu",
        "gelu",
        "gelu_backward",
        "mish",
        "mish_backward",
        "silu",
        "silu_backward",
        "sigmoid",
        "sigmoid_backward",
        "log_sigmoid_forward",
        "log_sigmoid_backward",
        "softplus",
        "softplus_backward",
        "hardsigmoid",
        "hardsigmoid_backward",
        "hardswish",
        "hardswish_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "linalg_qr",
        "linalg_vector_norm",
        "norm",
        "std",
        "std_mean",
        "var",
        "var_mean",
        "prod",
        "cumprod",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
        "huber_loss",
        "huber_loss_backward",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "soft_margin_loss",
        "soft_margin_loss_backward",
        "_cdist_forward",
        "_cdist_backward",
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        # Exact in truth, and granted this since the budgets of emulated int8 were measured with it:
        "abs_",
        "frac_",
        "frexp",
        "nan_to_num_",
    ]
)
"""Transcendental, normalizing and fused operators: their results may err by `accelcheck.verify.precision.INEXACT_ULPS`."""

CONTRACTIONS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "dot", "mv", "linear"}
)
"""Operators whose operands are rounded to the arithmetic precision before they are multiplied."""

SCATTERS = frozenset(
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
"""Operators that add to places that an index gives."""

COMPOSED = frozenset(
    [
        "polygamma",
        "digamma",
        "softplus",
        "mvlgamma",
        "special_zeta",
        "special_bessel_j0",
        "special_bessel_j1",
        "special_bessel_y0",
        "special_bessel_y1",
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
"""Operators that compute with a rounded intermediate: a mean that is subtracted, the argument of an exponential."""


INTERPOLATED = frozenset(
    """grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward upsample_linear1d upsample_linear1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d
    upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward""".split()
)
"""Operators whose weights come from coordinates: of W positions, the last has an error of W u, and so have the weights beside it."""

FACTORISED = frozenset(
    """_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve geqrf
    linalg_cholesky_ex linalg_cross linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular ormqr triangular_solve""".split()
)
"""Operators of linear algebra. They are stable backward: their result is that of operands that differ by N u times their largest
element (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorems 9.3, 10.3, 19.4)."""


MODULI = frozenset({"abs", "sgn"})
"""Operators of `EXACT` that compute a modulus of complex numbers."""


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
    moves = moves and not _accumulates(name, args, kwargs) and not (name in MODULI and has_complex(args))
    return not moves and not _selects(name, args) and _has_float((args, kwargs.values()))


def classified(name: str) -> bool:
    """Whether it is known how much an operator rounds. Others are granted what those of `INEXACT` are."""
    return name in CORRECTLY_ROUNDED or name in SCATTERS or name in INEXACT | FACTORISED | COMPOSED | INTERPOLATED or name.removesuffix("_") in INEXACT


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
    return [value if is_inexact(value) else None for value in (out if isinstance(out, (tuple, list)) else (out,))]


def floats(values: Iterable[Any]) -> list[Tensor]:
    """The floating-point and complex tensors among nested values."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            tensors += floats(value)
        elif is_inexact(value):
            tensors.append(value)
    return tensors


def is_float(value: Any) -> bool:
    """Whether a value is a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_inexact(value: Any) -> bool:
    """Whether a value is a floating-point or complex tensor."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def has_complex(values: Iterable[Any]) -> bool:
    """Whether there is a complex tensor among values."""
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _has_float(values: Iterable[Any]) -> bool:
    return any(
        is_inexact(value)
        if isinstance(value, Tensor)
        else isinstance(value, (tuple, list, ValuesView)) and _has_float(value)
        for value in values
    )


def _unannounced(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that an operator writes although its schema does not say so: batch norm's running statistics in training."""
    if name == "native_batch_norm" and args[5]:
        return floats(args[3:5])
    return []


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an otherwise inexact operator only selects: an extreme of what an index gathers, or a norm of order infinity."""
    if name in {"index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_", "segment_reduce"}:
        return any(word in {"amax", "amin", "max", "min"} for word in args if isinstance(word, str))
    return name in {"linalg_vector_norm", "norm"} and len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an otherwise exact operator adds: `index_put` with `accumulate`."""
    return name in {"index_put", "index_put_"} and bool(kwargs.get("accumulate", len(args) > 3 and args[3]))
