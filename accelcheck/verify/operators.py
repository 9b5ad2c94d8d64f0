"""Operators of torch: the rounding of each, and the tensors that they take, return and write to."""

import functools
import math
from collections.abc import Iterable, ValuesView
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcheck.workloads.base import is_inexact

EXACT = frozenset(
    """_pack_padded_sequence _sparse_compressed_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors sparse_mask
    _sparse_mask_projection _sparse_sum_backward _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc
    _to_sparse_csr abs adaptive_max_pool2d adaptive_max_pool3d alias_copy amax amin aminmax as_strided_ as_strided_copy
    as_strided_scatter bernoulli bernoulli_ block_diag cat cauchy_ ceil ceil_ channel_shuffle _chunk_cat clamp
    clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone complex _conj_physical conj_physical conj_physical_
    constant_pad_nd contiguous copy copy_ copysign copysign_ cummax cummin detach diag_embed diagonal_backward
    diagonal_copy diagonal_scatter embedding empty_like eq expand_copy exponential_ eye fill fill_ flip floor
    floor_ floor_divide fmax fmin fmod frac fractional_max_pool2d fractional_max_pool3d full_like gather ge_
    geometric_ gt_ hardshrink hardshrink_backward hardtanh hardtanh_backward heaviside histc im2col imag index
    index_copy index_copy_ index_fill index_fill_ index_put index_put_ index_select isnan kthvalue le_ lift_fresh
    lift_fresh_copy _local_scalar_dense log_normal_ logical_and logical_not logical_or logical_xor lt_ lu_unpack
    masked_fill masked_fill_ masked_scatter masked_scatter_ masked_scatter_backward masked_select max
    max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d maximum median min minimum mode
    nan_to_num nanmedian narrow_copy native_dropout_backward ne neg neg_ new_empty new_empty_strided new_full
    new_ones new_zeros nextafter normal normal_ ones_like permute_copy pixel_shuffle pixel_unshuffle
    prims::copy_strided put put_ rand_like randint_like randn_like random_ real reflection_pad1d reflection_pad2d
    reflection_pad3d relu relu_ repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    _reshape_copy resize_ resize_as_ roll rot90 round scatter scatter_ searchsorted select_backward
    select_scatter set_ sgn sign slice_backward slice_scatter softshrink_backward sort split_copy
    split_with_sizes_copy squeeze_ squeeze_copy stack t_ t_copy take threshold threshold_backward _to_copy topk
    transpose_ transpose_copy tril tril_ triu triu_ trunc trunc_ unbind_copy unfold unfold_copy uniform_ _unique2
    unique_consecutive unique_dim _unsafe_index _unsafe_masked_index unsafe_split _unsafe_view unsqueeze_
    unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d view_copy where zero zero_ zeros_like""".split()
)
"""Operators that only move, select, compare, count or negate: they never round."""

CORRECTLY_ROUNDED = frozenset(
    """_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward add add_ addbmm addcdiv addcdiv_ addcmul addcmul_ addmm
    addmv addr avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm bmm _coalesce col2im convolution
    convolution_backward cumsum deg2rad div div_ dot _embedding_bag _embedding_bag_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward embedding_dense_backward fractional_max_pool2d_backward
    fractional_max_pool3d_backward index_add index_add_ ldexp leaky_relu leaky_relu_backward lerp lerp_ linear
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward mean mm mse_loss mse_loss_backward mul mul_ mv
    nansum nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward _prelu_kernel
    _prelu_kernel_backward rad2deg reciprocal reciprocal_ reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward remainder replication_pad1d_backward replication_pad2d_backward
    replication_pad3d_backward rsub scatter_add segment_reduce _segment_reduce_backward softshrink _sparse_addmm
    sparse_sampled_addmm _sparse_sparse_matmul _sparse_sum sqrt sqrt_ square sub sub_ sum trace _trilinear
    unfold_backward upsample_nearest1d_backward upsample_nearest2d_backward
    upsample_nearest3d_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward vdot""".split()
)
"""Operators that err by the rounding of the result and the accumulation of a sum alone."""

COUNTING = frozenset(
    """_embedding_bag _embedding_bag_forward_only add add_ addbmm addcmul addcmul_ addmm addmv addr baddbmm bmm cumsum dot
    embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl_ linear mm mul mul_ mv nansum put
    put_ rsub scatter_add scatter_add_ sub sub_ sum trace vdot""".split()
)
"""Sums and products alone, of which an integer in range is exact in any order: masks, counts, positions."""

COMPOSED = frozenset(
    """_batch_norm_with_update digamma gelu i0 log_softmax _log_softmax logaddexp logaddexp2 multi_margin_loss
    multi_margin_loss_backward multilabel_margin_loss_backward mvlgamma native_batch_norm
    _native_batch_norm_legit native_group_norm native_layer_norm polygamma round.decimals silu sinc softmax
    _softmax softplus special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_zeta _sparse_log_softmax _sparse_softmax""".split()
)
"""Operators with a rounded intermediate: a subtracted mean, the argument of an exponential."""

INEXACT = COMPOSED | frozenset(
    """_ctc_loss _ctc_loss_backward _weight_norm_interface _weight_norm_interface_backward
    abs_ acos acosh angle asin asinh atan atan2 atanh binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits _cdist_backward _cdist_forward celu cos cosh cumprod dist elu elu_backward
    embedding_renorm_ erf erfc erfinv exp exp2 expm1 fake_quantize_per_tensor_affine_cachemask _fft_c2c _fft_c2r
    _fft_r2c frac_ frexp _fused_rms_norm _fused_rms_norm_backward gelu_backward glu glu_backward hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward histogram _histogramdd_bin_edges _histogramdd_from_bin_cts
    huber_loss huber_loss_backward hypot igamma igammac index_reduce lgamma linalg_qr linalg_vector_norm linspace
    log log10 log1p log2 log_sigmoid log_sigmoid_backward log_sigmoid_forward _log_softmax_backward_data
    logcumsumexp logit logit_backward logspace logsumexp mish mish_backward multilabel_margin_loss_forward
    nan_to_num_ native_batch_norm_backward _native_batch_norm_legit_no_training native_group_norm_backward
    native_layer_norm_backward norm outer _pdist_backward _pdist_forward polar pow prod renorm rrelu_with_noise
    rrelu_with_noise_backward rsqrt _safe_softmax scatter_reduce sigmoid sigmoid_backward silu_backward sin sinh
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward _softmax_backward_data
    softplus_backward _sparse_log_softmax_backward_data _sparse_softmax_backward_data special_entr special_xlog1py std
    std_mean tan tanh tanh_backward true_divide var var_mean
    xlogy""".split()
)
"""Transcendental, normalizing and fused operators, which may err by `accelcheck.verify.precision.INEXACT_ULPS`.

``abs_``, ``frac_``, ``frexp`` and ``nan_to_num_`` are exact, but listed, since the budgets of emulated int8 were
measured so.
"""

CONTRACTIONS = frozenset(
    """mm addmm addmv addbmm bmm baddbmm convolution convolution_backward dot vdot mv linear _sparse_addmm
    sparse_sampled_addmm _sparse_sparse_matmul""".split()
)
"""Operators whose operands are rounded to the arithmetic precision before they are multiplied."""

SCATTERS = frozenset(
    """embedding_dense_backward index_add index_add_ index_put index_put_ _index_put_impl_ scatter_add scatter_add_ put
    put_ _unsafe_index_put _unsafe_masked_index_put_accumulate""".split()
)
"""Operators that add to indexed places."""

INTERPOLATED = frozenset(
    """grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward upsample_bicubic2d
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward upsample_bicubic2d_backward upsample_bilinear2d
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward""".split()
)
"""Operators with weights from coordinates."""

FACTORISED = frozenset(
    """cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_cross _linalg_det linalg_eig
    _linalg_eigh linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve
    linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr _linalg_slogdet
    _linalg_solve_ex linalg_solve_triangular _linalg_svd ormqr triangular_solve""".split()
)
"""Operators of linear algebra, stable backward: their result is that of operands moved by a multiple of u times the
norm of their columns. The multiple is at most N and more (N. J. Higham, Accuracy and Stability of Numerical Algorithms,
2002, theorems 9.3, 10.3, 19.4), and about the root of N where errors are independent (Higham and Mary, SIAM J. Sci.
Comput. 41(5), 2019)."""


TRANSFORMS = frozenset({"_fft_c2c", "_fft_r2c", "_fft_c2r"})
"""Fourier transforms, along the dimensions of their second argument."""
NORMALISED = frozenset({"softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax"})
"""Operators that divide a row, along the dimension of their second argument, by its sum, whose error all of it has."""
DECOMPOSED = frozenset(
    """addcdiv addcmul addr binary_cross_entropy binary_cross_entropy_with_logits lerp logit
    sinc""".split()
)
"""Operators that round like their decomposition in the accumulator's precision, and once more: terms of both signs that
cancel, a logarithm near 0 of a rounded quotient, a sine of a rounded multiple of pi."""

OF_INTEGERS = (INEXACT | {"div", "sqrt", "reciprocal"}) - {"abs_", "cumprod", "pow", "prod"}
"""Operators that give floating-point numbers for integers too."""

MODULI = frozenset({"abs", "sgn"})
"""Operators of `EXACT` that compute a modulus of complex numbers."""


class OperatorFacts(NamedTuple):
    """Facts from an operator's schema.

    Attributes:
        name: Name without overload, with a namespace that is not torch's own; only torch's operators are listed here.
        moves: True for operators that only move or select.
        written: Positions and names of arguments that it writes to; None without any.
        plain: Operator that an in-place one of `COMPOSED` or `CONTRACTIONS` writes the result of, or None.
    """

    name: str
    moves: bool
    written: tuple[tuple[int, str], ...] | None
    plain: Any = None


@functools.cache
def facts(func: Any) -> OperatorFacts:
    """Facts of an operator's overload."""
    name, _, overload = func.name().removeprefix("aten::").partition(".")
    plain = getattr(getattr(torch.ops.aten, name[:-1], None), overload or "default", None) if name[-1] == "_" else None
    if overload.startswith("decimals"):
        name = f"{name}.decimals"  # it multiplies and divides, where `round` alone is exact
    if not classified(name) and name.removesuffix("_") in EXACT | CORRECTLY_ROUNDED:
        name = name.removesuffix("_")
    schema = func._schema  # noqa: SLF001 - OpOverload has no public schema
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if plain is not None and facts(plain).name not in COMPOSED | CONTRACTIONS:
        plain = None
    return OperatorFacts(name, func.is_view or name in EXACT, written if schema.is_mutable else None, plain)


def may_round(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call may round: it does more than move numbers, and has floating-point ones."""
    name, moves, *_ = facts(func)
    moves = moves and not _accumulates(name, args, kwargs) and not (name in MODULI and has_complex(args))
    return not moves and not _selects(name, args) and (name in OF_INTEGERS or _has_float((args, kwargs.values())))


def classified(name: str) -> bool:
    """True if an operator's rounding is listed; others are granted what those of `INEXACT` are."""
    # Operators of `EXACT` may round in some calls.
    known = (EXACT, CORRECTLY_ROUNDED, SCATTERS, INEXACT, FACTORISED, INTERPOLATED)
    return any(name in names for names in known) or name.removesuffix("_") in INEXACT


def results(func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Tensors that a call returned or wrote to; None for those not requested or not in floating point."""
    name, _, written, _ = facts(func)
    if written is None:
        returned = outputs(out)
        if name == "multilabel_margin_loss_forward":
            returned[1] = None  # a mask of the target classes
    else:
        values = (args[position] if position < len(args) else kwargs.get(name) for position, name in written)
        changed = floats(values)
        # Batch norm returns results besides updated statistics; an in-place write returns the tensor it wrote to.
        returned = [*changed, *(tensor for tensor in outputs(out) if all(tensor is not other for other in changed))]
    if name == "native_batch_norm" and args[5]:  # running statistics, written without a note in the schema
        returned = [*returned, *floats(args[3:5])]
    return returned


def outputs(out: Any) -> list[Tensor | None]:
    """Outputs in their places; None for those not requested or not in floating point."""
    return [value if is_inexact(value) else None for value in (out if isinstance(out, (tuple, list)) else (out,))]


def floats(values: Iterable[Any]) -> list[Tensor]:
    """Floating-point and complex tensors among nested values."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            tensors += floats(value)
        elif is_inexact(value):
            tensors.append(value)
    return tensors


def is_float(value: Any) -> bool:
    """True for a floating-point tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def integers_in(values: Iterable[Any]) -> float:
    """Product of the largest magnitudes of floating-point tensors, at least 1 each; infinite unless all are integers."""
    product = 1.0
    for value in filter(is_float, values):
        if value.layout != torch.strided:
            return math.inf
        if value.numel():
            # The first element tells nearly all other tensors apart.
            if value[(0,) * value.dim()].item() % 1 != 0 or bool((value != value.trunc()).any()):
                return math.inf
            product *= max(1.0, float(value.abs().max()))
    return product


def has_complex(values: Iterable[Any]) -> bool:
    """True if a value is a complex tensor."""
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)


def _has_float(values: Iterable[Any]) -> bool:
    # Forward-mode derivatives run operators on meta tensors to learn strides.
    return any(
        is_inexact(value) and not value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, (tuple, list, ValuesView)) and _has_float(value)
        for value in values
    )


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """True for a call of an inexact operator that only selects: an indexed extreme, or a norm of order infinity."""
    if has_complex(args):
        return False
    if name in {"index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_", "segment_reduce"}:
        return any(word in {"amax", "amin", "max", "min"} for word in args if isinstance(word, str))
    return (
        name in {"linalg_vector_norm", "norm"} and len(args) > 1 and isinstance(args[1], float) and math.isinf(args[1])
    )


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for an exact operator that adds.

    These are `index_put` and `put` with `accumulate`, `scatter` with `reduce`, and `_to_dense` of entries named twice.
    """
    if name == "_to_dense":
        return args[0].layout is torch.sparse_coo and not args[0].is_coalesced()
    if name in {"scatter", "scatter_"}:
        return "reduce" in kwargs or any(isinstance(value, str) for value in args)
    return name in {"index_put", "index_put_", "put", "put_"} and bool(
        kwargs.get("accumulate", len(args) > 3 and args[3])
    )
