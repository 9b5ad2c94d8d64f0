"""Faults of kernels with inputs that are no dense rows: padded, offset, transposed, channels-last, indexed, shared."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, PlantedFault, fault, passes, row, single
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import Kernel, kernels
from accelcheck.selftest.faults.sowing import swapped
from accelcheck.techniques.interop import dlpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def as_dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes a tensor for a dense one."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def strides_ignored(strength: float) -> Change:
    """Matrix products read their left operand as if its rows followed each other."""
    return kernels(
        mm=lambda func, left, right: func(as_dense(left), right),
        addmm=lambda func, bias, left, right: func(bias, as_dense(left), right),
    )


def gradient_as_dense(strength: float) -> Change:
    """A backward kernel reads the output's gradient as dense rows."""
    return kernels(native_layer_norm_backward=lambda func, gradient, *rest: func(as_dense(gradient), *rest))


def aligned_down(strength: float) -> Change:
    """A kernel with vector loads reads from the next lower multiple of 16 bytes."""

    def gelu(func: Kernel, x: Tensor, **options: Any) -> Tensor:
        early = x.data_ptr() % 16 // x.element_size()
        return func(x.as_strided(x.shape, x.stride(), x.storage_offset() - early), **options)

    return kernels(gelu=gelu)


def read_as_rows(strength: float) -> Change:
    """A convolution reads channels-last images as if they were in the usual order."""
    return kernels(convolution=lambda func, x, *rest: func(as_dense(x), *rest))


def copy_short(strength: float) -> Change:
    """A copy to dense memory leaves out the last row."""

    def clone(func: Any, x: Tensor, **options: Any) -> Tensor:
        out: Tensor = func(x, **options)
        if not x.is_contiguous():
            out[-1:] = 0
        return out

    return kernels(clone=clone)


def last_place_clamped(name: str, index: int) -> Callable[[float], Change]:
    """An indexing kernel takes indices of the last element for those of the one before.

    Args:
        name: Of the operator.
        index: Position of the indices among its arguments: a tensor, or a list of tensors of which the last one is meant.
    """

    def clamped(x: Tensor, places: Tensor, dim: int) -> Tensor:
        return places.clamp(max=x.size(dim) - 2) if places.dtype == torch.int64 else places

    def kernel(func: Kernel, x: Tensor, *args: Any) -> Tensor:
        given = args[index]
        if isinstance(given, Tensor):
            wrong: Any = clamped(x, given, args[0])
        else:
            last = max(dim for dim, places in enumerate(given) if places is not None)
            wrong = [clamped(x, places, dim) if dim == last else places for dim, places in enumerate(given)]
        return func(x, *args[:index], wrong, *args[index + 1 :])

    return lambda _: kernels(**{name: kernel})


@contextlib.contextmanager
def imported_dense(strength: float) -> Iterator[None]:
    """NumPy imports a tensor with the strides of a dense array."""

    def wrong(plain: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
        array = plain(tensor, *args, **options)
        if not array.size or array.flags.c_contiguous or 0 in array.strides:
            return array
        sizes = np.empty(array.shape, array.dtype).strides
        return np.lib.stride_tricks.as_strided(array, array.shape, sizes)

    with swapped(np, "from_dlpack", wrong):
        yield


def copied_once(strength: float) -> contextlib.AbstractContextManager[None]:
    """The tensor over an array's memory is a copy, made once for each address."""
    kept: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def wrong(plain: Callable[..., Tensor], array: Any, *args: Any, **options: Any) -> Tensor:
        came = plain(array, *args, **options)
        return kept.setdefault((came.data_ptr(), tuple(came.shape)), came.clone())

    return swapped(dlpack, "from_dlpack", wrong)


MATMUL, MLP = Cell("matmul"), Cell("mlp")

slow = row(PlantedFault, seeds=10)

FAULTS = (
    fault("row-stride-ignored", "A product reads padded rows as if they followed each other.")(
        (MATMUL, MLP), strides_ignored, technique="view-padded"
    ),
    fault("transposition-ignored", "A product reads a transposed input as if it were in the usual order.")(
        (MLP, Cell("mlp", Mode.BACKWARD)), strides_ignored, technique="view-transposed"
    ),
    fault(
        "cotangent-read-as-rows",
        "A backward kernel reads the output's gradient, which comes from a transposition, as dense rows.",
    )((Cell("layer-norm-narrow", Mode.BACKWARD),), gradient_as_dense, exists=strided),
    fault("address-aligned-down", "A kernel with vector loads reads an input from the next lower aligned address.")(
        (Cell("gelu"),), aligned_down, technique="view-offset"
    ),
    fault("channels-last-read-as-rows", "A convolution reads channels-last images in the usual order.")(
        (Cell("conv-strided"), Cell("conv-depthwise")), read_as_rows, technique="channels-last"
    ),
    slow("copy-short", "A copy to dense memory leaves out the last row.")(
        (single("matmul-transposed"),), copy_short, technique="contiguous"
    ),
    slow("selection-clamped", "A selection by an index tensor takes the last row for the one before.")(
        passes("advanced-indexing"), last_place_clamped("index_select", 1), technique="index-select"
    ),
    slow("brackets-clamped", "Indexing by tensors in brackets takes the last place for the one before.")(
        (Cell("index-select"), Cell("gather-repeated")), last_place_clamped("index", 0), technique="index-advanced"
    ),
    slow("dlpack-strides-lost", "An array over a tensor's memory has lost its strides.")(
        (Cell("matmul-transposed", dtypes=("float32", "float16")),), around=imported_dense, technique="dlpack-numpy"
    ),
    slow("dlpack-copied-once", "A tensor that comes back is a copy that was made when its address was first seen.")(
        (Cell("mlp", dtypes=("float32", "float16")), Cell("train-mlp", Mode.TRAIN, ("float32", "float16"))),
        around=copied_once,
        technique="dlpack-numpy",
    ),
)
