"""Faults of matrix products and convolutions: tails, accumulation, reduced operands, truncation, autocast's sums."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.core.capability import Capability
from accelcheck.core.case import Mode
from accelcheck.devices.base import Device
from accelcheck.selftest.faults import plant
from accelcheck.selftest.faults.base import HALVES, Cell, Change, alike, backward, derived, fault, single, trained
from accelcheck.selftest.faults.compute import half_accumulation
from accelcheck.selftest.faults.plant import Kernel, always, aside, backward_kernels, convolution, products, rounded_to

PARTS = 8
"""Number of thread blocks that share the terms of a sum."""


def stale_tail(a: Tensor, b: Tensor) -> Tensor:
    """The row after the last whole tile holds another row's result. It is that of the row before."""
    out = a @ b
    out[..., -1, :] = out[..., -2, :]
    return out


def without_last_term(a: Tensor, b: Tensor) -> Tensor:
    """The last product of each sum is omitted."""
    return a[..., :-1] @ b[..., :-1, :]


def bfloat16_accumulation(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products are added up in bfloat16, sixteen at a time."""
    left, right = a.float(), b.float()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.bfloat16)
    for k in range(0, a.shape[-1], 16):
        total = (total.float() + left[..., k : k + 16] @ right[..., k : k + 16, :]).bfloat16()
    return total.float()


def narrow_partial_sums(unit: float, a: Tensor, b: Tensor) -> Tensor:
    """Splits K into `PARTS`, rounds the sum of each to a unit roundoff, and adds these in FP32."""
    wide_a, wide_b = a.float(), b.float()
    bits = round(-math.log2(unit))
    size = max(1, -(-a.shape[-1] // PARTS))
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for k in range(0, a.shape[-1], size):
        total += rounded_to(bits, wide_a[..., k : k + size] @ wide_b[..., k : k + size, :])
    return total


def reduced(bits: int, a: Tensor, b: Tensor) -> Tensor:
    """Rounds operands to fewer bits; products and sums are in FP32."""
    return rounded_to(bits, a) @ rounded_to(bits, b)


def three_products(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products are sums of three of bfloat16 operands where FP32 was asked for."""
    high_a, high_b = rounded_to(8, a), rounded_to(8, b)
    low_a, low_b = rounded_to(8, a - high_a), rounded_to(8, b - high_b)
    return high_a @ high_b + (high_a @ low_b + low_a @ high_b)


truncating = partial(plant.truncated, torch.matmul)
"""Truncates the result of a product to the storage dtype instead of rounding it to nearest."""


@always(lambda wrong: convolution(forward=wrong))
def reduced_convolution(func: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Convolutions take TF32 operands where FP32 was asked for."""
    return func(rounded_to(11, x), rounded_to(11, weight), *rest)


@always(lambda wrong: convolution(backward=wrong))
def reduced_convolution_backward(func: Any, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """Gradients of convolutions take TF32 operands where FP32 was asked for."""
    return func(rounded_to(11, grad), rounded_to(11, x), rounded_to(11, weight), *rest)


@aside
def _half_sum(x: Tensor, over: list[int]) -> Tensor:
    """Adds in FP16, one after the other, over the first dimension."""
    if over != [0]:
        raise ValueError(f"the planted sum is over the first dimension, not over {over}")
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.add.accumulate(x.half().numpy(), axis=0)[-1].astype(np.float32))


def half_sum(func: Any, x: Tensor, over: list[int], *rest: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Under autocast a sum that should be FP32 is added up in FP16. Its result has the right dtype."""
    return _half_sum(x, list(over)).to(x.dtype if dtype is None else dtype)


def _needs_autocast(device: Device) -> Capability:
    from accelcheck.techniques.precision.amp import TECHNIQUES

    (technique,) = (technique for technique in TECHNIQUES if technique.name == "amp-fp16")
    return technique.capability(device)


_everywhere = always(products)
_backward = always(partial(products, plant=backward_kernels))


def _parts_everywhere(unit: float) -> Change:
    return products(partial(narrow_partial_sums, unit))


_BFLOAT16, _FLOAT16 = 2.0**-8, 2.0**-11
"""Unit roundoffs."""


def _but_in_bfloat16(workload: str, reason: str, mode: Mode = Mode.FORWARD) -> Cell:
    """A cell in which rounding to bfloat16 hides the fault."""
    return Cell(workload, mode, ("float32", "float16"), {"bfloat16": reason})


_ONE_OF_MANY = "one of 4097 terms is 0.02 % of the sum, and bfloat16 rounds by up to 0.39 %"
_FEW_UNITS = "sums of at most 64 terms of both signs err by a few units of 2**-11, as FP16 operands and results do"
_SIX_ROUNDINGS = "six roundings of 96 products to bfloat16 err as the one rounding of the result does"
_LONG_SUMS = "correct sums of 4097 terms of one sign err by up to sqrt(4097) / 3 = 21 units of 2**-24"
_EDGE_OF_LONG_SUMS = (
    "eight parts rounded so err together by 38 units of 2**-24 (RMS), at the edge of what correct sums of 4097 terms "
    "may: 298 of 300 seeds catch it"
)
_PARTS_AND_SUM = "parts of a sum err together by no more than the sum itself, which is rounded"
_ONE_UNIT = (
    "truncation moves a result by at most one unit in the last place; correct FP32 sums of 96 terms differ by "
    "sqrt(96) = 10"
)
_FEW_TERMS = "at most 96 terms in FP16 err less than the one rounding to bfloat16 that follows"
_HALVES = dict.fromkeys(HALVES, "operands in half precision are not rounded further: the mode is about FP32")

_STRENGTHS = (_BFLOAT16, _FLOAT16, 2.0**-14, 2.0**-17, 2.0**-19, 2.0**-22)
_OWN_ROWS = dict.fromkeys(HALVES, "split-k-partial-sums-half is planted in half precision")

split = alike(number=8, absent=_OWN_ROWS)
fp32 = alike(number=9, absent=_HALVES)

FAULTS = (
    fault("stale-last-row")(Cell("matmul-129"), _everywhere(stale_tail), number=6),
    fault(
        "stale-last-row-backward",
        "In products of the backward pass the row after the last whole tile holds another row's result.",
    )(backward("matmul"), _backward(stale_tail), number=6),
    fault("last-k-dropped")(
        (Cell("matmul"), _but_in_bfloat16("matmul-long", _ONE_OF_MANY)), _everywhere(without_last_term), number=7
    ),
    fault("last-k-dropped-backward", "In the backward pass the last product of each sum is omitted.")(
        backward("mlp"), _backward(without_last_term), number=7
    ),
    fault("float16-accumulation")(
        (_but_in_bfloat16("matmul", _FEW_TERMS), Cell("matmul-long")), _everywhere(half_accumulation), number=8
    ),
    fault("float16-accumulation-backward", "Matrix products of the backward pass are added up in FP16.")(
        _but_in_bfloat16("mlp", _FEW_TERMS, Mode.BACKWARD),
        _backward(half_accumulation),
        number=8,
        hidden={("float16", 1.0): _FEW_UNITS},
    ),
    fault("bfloat16-accumulation")(
        (_but_in_bfloat16("matmul", _SIX_ROUNDINGS), Cell("matmul-long")), _everywhere(bfloat16_accumulation), number=8
    ),
    split(
        "split-k-partial-sums",
        f"Sums of FP32 are split into {PARTS}, and the sums of the parts rounded early; the strength "
        "is the unit roundoff.",
    )(
        single("matmul"),
        _parts_everywhere,
        _STRENGTHS,
        hidden={("float32", 2.0**-22): "correct sums of 96 terms err by up to sqrt(96 / 6) = 4 units of 2**-24"},
    ),
    split(
        "split-k-partial-sums-backward",
        f"In the backward pass sums of FP32 are split into {PARTS}, and the sums of the parts rounded early.",
    )(
        derived("mlp"),
        lambda unit: products(partial(narrow_partial_sums, unit), backward_kernels),
        _STRENGTHS,
        hidden={("float32", 2.0**-22): "correct sums of 64 terms err by up to sqrt(64 / 6) = 3 units of 2**-24"},
    ),
    split(
        "split-k-partial-sums-long",
        f"Sums of 4097 terms in FP32 are split into {PARTS}, and the sums of the parts rounded early.",
    )(
        single("matmul-long"),
        _parts_everywhere,
        (_BFLOAT16, _FLOAT16, 2.0**-14, 2.0**-15, 2.0**-16, 2.0**-18),
        hidden={("float32", 2.0**-16): _EDGE_OF_LONG_SUMS, ("float32", 2.0**-18): _LONG_SUMS},
    ),
    split(
        "split-k-partial-sums-half",
        f"Sums of half precision are split into {PARTS}, and the sums of the parts rounded early.",
    )(
        (Cell("matmul", dtypes=HALVES), Cell("matmul-long", dtypes=HALVES)),
        _parts_everywhere,
        (2.0**-5, _BFLOAT16, _FLOAT16),
        absent={"float32": "the faults of FP32 sums are rows of their own"},
        hidden={
            ("bfloat16", _BFLOAT16): f"{_PARTS_AND_SUM} to bfloat16 too",
            ("bfloat16", _FLOAT16): "eight times less than the rounding of the result to bfloat16",
            ("float16", _FLOAT16): f"{_PARTS_AND_SUM} to FP16 too",
        },
    ),
    fp32("tf32-for-float32", "Matrix products take TF32 operands where FP32 was asked for.")(
        (single("matmul"), trained("train-mlp")), _everywhere(partial(reduced, 11))
    ),
    fp32(
        "tf32-for-float32-backward", "Matrix products of the backward pass take TF32 operands where FP32 was asked for."
    )(derived("mlp"), _backward(partial(reduced, 11))),
    fp32("bfloat16-for-float32", "Matrix products take bfloat16 operands where FP32 was asked for.")(
        single("matmul"), _everywhere(partial(reduced, 8))
    ),
    fp32("bfloat16x3-for-float32")(single("matmul"), _everywhere(three_products)),
    fp32("tf32-convolution")(single("conv-strided"), reduced_convolution),
    fp32("tf32-convolution-backward")(derived("conv-strided"), reduced_convolution_backward),
    fault("truncated-products", "Results of matrix products are truncated to the storage dtype, not rounded.")(
        Cell("matmul"), _everywhere(truncating), number=10, hidden={("float32", 1.0): _ONE_UNIT}
    ),
    fault(
        "truncated-products-backward",
        "Results of matrix products of the backward pass are truncated to the storage dtype, not rounded.",
    )(backward("mlp"), _backward(truncating), number=10),
    fault("autocast-sum-in-float16")(
        single("matmul-total"),
        always(plant.kernel("sum"))(half_sum),
        number=31,
        technique="amp-fp16",
        exists=_needs_autocast,
    ),
)
