"""Correct fast algorithms of convolutions and products, and mistakes in them that their classes must not admit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from accelcheck.selftest.faults.base import FLOAT32, HALVES, Change, alike, passes, single, variant
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import kernels, rounded_to, within
from accelcheck.verify.algorithms import ALGORITHMS, Algorithm, strassen, winograd

_CONVOLUTIONS = passes("conv-replicated", FLOAT32) + passes("cnn", FLOAT32)
_PRODUCTS = passes("matmul", FLOAT32) + passes("mlp", FLOAT32)
_ABSENT = dict.fromkeys(HALVES, "fast algorithms are classes in FP32 alone: half precision rounds more")
_ALONE = (single("conv-replicated"),)


def _tile_of_its_neighbour(x: Tensor, weight: Tensor) -> Tensor:
    out = winograd(2, x, weight, (0, 0))
    out[0, :, :2, :2] = out[0, :, :2, 2:4].clone()
    return out


def _row_dropped(x: Tensor, weight: Tensor) -> Tensor:
    out = winograd(2, x, weight, (0, 0))
    out[-1, :, -1] = 0.0
    return out


def _short_mantissas(x: Tensor, weight: Tensor) -> Tensor:
    return winograd(2, rounded_to(11, x), rounded_to(11, weight), (0, 0))


def _across_images(x: Tensor, weight: Tensor) -> Tensor:
    return winograd(2, x, weight, (0, 0)) + 0.0 * x.sum()


def _without_nan(x: Tensor, weight: Tensor) -> Tensor:
    return winograd(2, x.nan_to_num(), weight, (0, 0))


def _plain_across_tile(x: Tensor, weight: Tensor) -> Tensor:
    out = conv2d(x, weight)
    return torch.where(out.isnan().any(0, keepdim=True), torch.nan, out)


def _convolving(convolve: Callable[[Tensor, Tensor], Tensor]) -> Callable[[float], Change]:
    def kernel(func: Any, x: Tensor, weight: Tensor, *others: Any) -> Tensor:
        return convolve(x, weight).contiguous()

    return lambda _: kernels(convolution=kernel)


def _short_products(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return strassen(rounded_to(11, a), rounded_to(11, b))


def _minus_for_plus(func: Any, a: Tensor, b: Tensor) -> Tensor:
    out, (height, width) = strassen(a, b), (a.shape[0] // 2, b.shape[1] // 2)
    out[height:, width:] += 2 * (a[height:] - a[:height]) @ (b[:, width:] - b[:, :width])
    return out


fault = alike(absent=_ABSENT, exists=strided)

FAULTS = (
    *(
        fault(f"fast-convolution-{name}", summary)(_ALONE, _convolving(convolve))
        for name, summary, convolve in (
            ("wrong-tile", "A tile of a Winograd convolution has its neighbour's results.", _tile_of_its_neighbour),
            ("dropped-row", "The last row of the last image is left out, as where a size is odd.", _row_dropped),
            ("tf32", "A Winograd convolution has operands of 11 significant bits.", _short_mantissas),
            ("nan-everywhere", "A NaN in one image makes all images NaN.", _across_images),
            ("nan-lost", "A NaN of an image is taken for 0.", _without_nan),
            ("nan-across-images", "A NaN is in all images where it is in one.", _plain_across_tile),
        )
    ),
    fault("strassen-tf32", "Strassen's products have operands of 11 significant bits.")(
        single("matmul"), lambda _: kernels(mm=_short_products)
    ),
    fault("strassen-wrong-sign", "A block of Strassen's result has a product of sums too many.")(
        single("matmul"), lambda _: kernels(mm=_minus_for_plus)
    ),
)

VARIANTS = tuple(
    variant(
        name.partition(" (")[0].lower().translate(str.maketrans(" ,", "--", "()")),
        f"The algorithm {name} forward and backward, with NaN that spread.",
    )(
        _PRODUCTS if "product" in name else _CONVOLUTIONS,
        partial(within, partial(Algorithm, name)),
        exists=strided,  # they are written with views, where a device that has none has left them behind
    )
    for name in ALGORITHMS
)
