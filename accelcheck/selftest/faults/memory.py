"""Faults of memory: ignored strides, broadcast operands, overlaps, overwritten inputs, rows never written."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelcheck.core.capability import Capability
from accelcheck.core.case import Mode
from accelcheck.devices.base import Device
from accelcheck.selftest.faults import plant
from accelcheck.selftest.faults.base import Cell, Change, alike, backward, fault, passes, single
from accelcheck.selftest.faults.plant import Kernel, always, backward_kernels, backwards, calling, kernel, output
from accelcheck.selftest.faults.sowing import replacing, swapped
from accelcheck.techniques.interop import dlpack
from accelcheck.workloads.base import Result


def strided(device: Device) -> Capability:
    """Capability of strides, which a fault can ignore."""
    from accelcheck.techniques.base import Technique

    return Technique().needs(device, "strided")


@always(calling)
def without_offset(module: nn.Module, x: Tensor) -> Any:
    """A view is read from the beginning of its storage. Its strides apply."""
    return module(x.as_strided(x.shape, x.stride(), 0))


def reading_dense(module: nn.Module, x: Tensor) -> Any:
    """The module, with an input that is read as if it were contiguous."""
    return module(as_dense(x))


@always(output)
def written_across(out: Tensor) -> Tensor:
    """A result that was asked for in column-major memory is written in row-major order."""
    return out.reshape(out.shape[::-1]).mT.contiguous()


@always(kernel("sum", plant=backward_kernels))
def first_alone(func: Any, x: Tensor, over: Any = None, keep: Any = None, **more: Any) -> Tensor:
    """The gradient of a broadcast operand is that of its first use only. Sums return their first element."""
    dims = range(x.dim()) if over is None else (d % x.dim() for d in over)
    for dim in sorted(dims, reverse=True):
        x = x.narrow(dim, 0, 1) if keep else x.select(dim, 0)
    return x.clone()


def in_place(module: Any, x: Tensor) -> Tensor:
    """An operator that reads neighbours runs in place, and reads values that it has just written."""
    columns = [x[:, 0]]
    for index in range(1, x.size(1)):
        columns.append(x[:, index] + columns[-1])
    return torch.stack(columns, 1)


def overwriting(share: float) -> Change:
    """An input is used as scratch memory; the strength is the share of its rows."""

    def call(plain: Any, x: Tensor, *rest: Any) -> Any:
        out = plain(x, *rest)
        with torch.no_grad():
            x[: max(1, int(len(x) * share))].mul_(1.5)
        return out

    return plant.wrapping(call)


@always(calling)
def drifting(module: nn.Module, *inputs: Any) -> Any:
    """A forward pass overwrites a parameter."""
    out = module(*inputs)
    with torch.no_grad():
        next(module.parameters()).mul_(1.5)
    return out


def unwritten(tensor: Tensor) -> Tensor:
    """The last row of a matrix product is not written."""
    out = torch.empty_like(tensor)
    out[..., :-1, :] = tensor[..., :-1, :]
    return out


@always(plant.editing)
def all_unwritten(result: Result) -> None:
    """The result is allocated and not written."""
    for path, tensor in result.items():
        result[path] = torch.empty_like(tensor)


def as_dense(x: Tensor) -> Tensor:
    """Reads the memory of `x` in row-major order, from its first element on."""
    strides = torch.empty(x.shape, device="meta").stride()
    return x.as_strided(x.shape, strides, x.storage_offset())


def strides_ignored(strength: float) -> Change:
    """A product reads padded rows as if they followed each other."""
    return plant.kernels(
        mm=lambda func, left, right: func(as_dense(left), right),
        addmm=lambda func, bias, left, right: func(bias, as_dense(left), right),
    )


@always(kernel("native_layer_norm_backward"))
def gradient_as_dense(func: Kernel, gradient: Tensor, *rest: Any) -> Any:
    """A backward kernel reads the output's gradient, which comes from a transposition, as dense rows."""
    return func(as_dense(gradient), *rest)


@always(kernel("gelu"))
def aligned_down(func: Kernel, x: Tensor, **options: Any) -> Tensor:
    """A kernel with vector loads reads an input from the next lower aligned address. Vectors have 16 bytes."""
    early = x.data_ptr() % 16 // x.element_size()
    return func(x.as_strided(x.shape, x.stride(), x.storage_offset() - early), **options)


@always(kernel("convolution"))
def read_as_rows(func: Kernel, x: Tensor, *rest: Any) -> Any:
    """A convolution reads channels-last images in the usual order."""
    return func(as_dense(x), *rest)


@always(kernel("clone"))
def copy_short(func: Any, x: Tensor, **options: Any) -> Tensor:
    """A copy to dense memory leaves out the last row."""
    out: Tensor = func(x, **options)
    if not x.is_contiguous():
        out[-1:] = 0
    return out


def _clamped(x: Tensor, places: Tensor, dim: int) -> Tensor:
    return places.clamp(max=x.size(dim) - 2) if places.dtype == torch.int64 else places


@always(kernel("index_select"))
def selection_clamped(func: Kernel, x: Tensor, dim: int, places: Tensor) -> Tensor:
    """A selection by an index tensor takes the last row for the one before."""
    return func(x, dim, _clamped(x, places, dim))


@always(kernel("index"))
def brackets_clamped(func: Kernel, x: Tensor, given: Any) -> Tensor:
    """Indexing by tensors in brackets takes the last place for the one before."""
    last = max(dim for dim, places in enumerate(given) if places is not None)
    return func(x, [_clamped(x, places, dim) if dim == last else places for dim, places in enumerate(given)])


@replacing(np, "from_dlpack")
def imported_dense(plain: Callable[..., Any], tensor: Any, *args: Any, **options: Any) -> Any:
    """An array over a tensor's memory has lost its strides. NumPy imports it as a dense one."""
    array = plain(tensor, *args, **options)
    if not array.size or array.flags.c_contiguous or 0 in array.strides:
        return array
    sizes = np.empty(array.shape, array.dtype).strides
    return np.lib.stride_tricks.as_strided(array, array.shape, sizes)


def copied_once(strength: float) -> AbstractContextManager[None]:
    """A tensor that comes back is a copy that was made when its address was first seen."""
    kept: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def wrong(plain: Callable[..., Tensor], array: Any, *args: Any, **options: Any) -> Tensor:
        came = plain(array, *args, **options)
        return kept.setdefault((came.data_ptr(), tuple(came.shape)), came.clone())

    return swapped(dlpack, "from_dlpack", wrong)


MATMUL, MLP = Cell("matmul"), Cell("mlp")
NUMPY = ("float32", "float16")
"""Storage dtypes that NumPy has."""

slow, numpy = alike(seeds=10), alike(technique="dlpack-numpy", seeds=10)

FAULTS = (
    fault("strides-ignored", "A transposed or sliced input is read as if it were contiguous.")(
        (Cell("matmul-transposed"), Cell("matmul-sliced")), always(calling)(reading_dense), number=19, exists=strided
    ),
    fault("strides-ignored-backward", "The backward pass reads a transposed input as if it were contiguous.")(
        backward("matmul-transposed"), always(backwards)(reading_dense), number=19, exists=strided
    ),
    fault("offset-ignored")(Cell("matmul-sliced"), without_offset, number=19, exists=strided),
    fault("output-strides-ignored")(Cell("matmul-127"), written_across, number=19),
    fault("broadcast-gradient-not-summed")(
        (backward("elementwise-broadcast"), backward("elementwise-scalar")), first_alone, number=20
    ),
    fault("overlap-in-place")(Cell("elementwise-overlap"), always(calling)(in_place), number=21),
    fault("overlap-in-place-backward", "The backward pass of an operator that reads neighbours runs in place.")(
        backward("elementwise-overlap"), always(backwards)(in_place), number=21
    ),
    fault("input-overwritten", "The caller's input is overwritten.")(Cell("elementwise-5"), overwriting, number=21),
    fault("parameter-overwritten")(MLP, drifting, number=21),
    fault("row-never-written")(Cell("matmul-129"), always(output)(unwritten), number=22),
    fault("row-never-written-backward", "The last row of the backward pass's matrix products is not written.")(
        backward("matmul"), lambda _: plant.products(lambda a, b: unwritten(a @ b), backward_kernels), number=22
    ),
    fault("nothing-written")(MLP, all_unwritten, number=22),
    fault("row-stride-ignored")((MATMUL, MLP), strides_ignored, technique="view-padded"),
    fault("transposition-ignored", "A product reads a transposed input as if it were in the usual order.")(
        (MLP, backward("mlp")), strides_ignored, technique="view-transposed"
    ),
    fault("cotangent-read-as-rows")(backward("layer-norm-narrow"), gradient_as_dense, exists=strided),
    fault("address-aligned-down")(Cell("gelu"), aligned_down, technique="view-offset"),
    fault("channels-last-read-as-rows")(
        (Cell("conv-strided"), Cell("conv-depthwise")), read_as_rows, technique="channels-last"
    ),
    slow("copy-short")(single("matmul-transposed"), copy_short, technique="contiguous"),
    slow("selection-clamped")(passes("advanced-indexing"), selection_clamped, technique="index-select"),
    slow("brackets-clamped")(
        (Cell("index-select"), Cell("gather-repeated")), brackets_clamped, technique="index-advanced"
    ),
    numpy("dlpack-strides-lost")(Cell("matmul-transposed", dtypes=NUMPY), around=imported_dense),
    numpy("dlpack-copied-once")((Cell("mlp", dtypes=NUMPY), Cell("train-mlp", Mode.TRAIN, NUMPY)), around=copied_once),
)
