"""Faults of memory: strides ignored, gradients of broadcast operands, overlaps, inputs overwritten, rows never written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, fault
from accelcheck.selftest.faults.plant import backward_kernels, backwards, calling, editing, products, replacing

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.core.capability import Capability
    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Result


def strided(device: Device) -> Capability:
    """Devices whose tensors have strides, which a fault can ignore."""
    from accelcheck.techniques.base import Technique

    return Technique().needs(device, "strided")


def without_strides(x: Tensor) -> Tensor:
    """Reads the memory of ``x (M, N)`` in row-major order, from its first element on."""
    return x.as_strided(x.shape, (x.size(1), 1), x.storage_offset())


def without_offset(x: Tensor) -> Tensor:
    """Applies the strides of `x` from the beginning of its storage."""
    return x.as_strided(x.shape, x.stride(), 0)


def reading(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Any:
    """The module, with an input that is read in another way."""
    return module(function(x))


def written_across(out: Tensor) -> Tensor:
    """Writes a result in row-major order into memory that was asked for in column-major order."""
    return out.reshape(out.shape[::-1]).mT.contiguous()


def first_alone(func: Any, x: Tensor, over: Any = None, keep: bool = False, **more: Any) -> Tensor:  # noqa: FBT001, FBT002 - as aten::sum passes it
    """Returns the first element instead of the sum."""
    dims = range(x.dim()) if over is None else (d % x.dim() for d in over)
    for dim in sorted(dims, reverse=True):
        x = x.narrow(dim, 0, 1) if keep else x.select(dim, 0)
    return x.clone()


def in_place(module: Any, x: Tensor) -> Tensor:
    """Adds neighbours in place, from left to right, so that each sum is the next element's neighbour."""
    columns = [x[:, 0]]
    for index in range(1, x.size(1)):
        columns.append(x[:, index] + columns[-1])
    return torch.stack(columns, 1)


def overwriting(module: nn.Module, x: Tensor, *rest: Any) -> Any:
    """Reuses the input's memory after reading it."""
    out = module(x, *rest)
    with torch.no_grad():
        x.mul_(1.5)
    return out


def drifting(module: nn.Module, *inputs: Any) -> Any:
    """A forward pass changes a parameter."""
    out = module(*inputs)
    with torch.no_grad():
        next(module.parameters()).mul_(1.5)
    return out


def unwritten(tensor: Tensor) -> Tensor:
    """Copies all but the last row into newly allocated memory."""
    out = torch.empty_like(tensor)
    out[..., :-1, :] = tensor[..., :-1, :]
    return out


def never_written(a: Tensor, b: Tensor) -> Tensor:
    """A product whose last row is not written, and holds the memory's old content."""
    return unwritten(a @ b)


def all_unwritten(result: Result) -> None:
    """Writes nothing."""
    for path, tensor in result.items():
        result[path] = torch.empty_like(tensor)


FAULTS = (
    fault("strides-ignored", "A transposed or sliced input is read as if it were contiguous.")(
        (Cell("matmul-transposed"), Cell("matmul-sliced")),
        lambda _: calling(partial(reading, without_strides)),
        number=19,
        exists=strided,
    ),
    fault("strides-ignored-backward", "The backward pass reads a transposed input as if it were contiguous.")(
        (Cell("matmul-transposed", Mode.BACKWARD),),
        lambda _: backwards(partial(reading, without_strides)),
        number=19,
        exists=strided,
    ),
    fault("offset-ignored", "A view is read from the beginning of its storage.")(
        (Cell("matmul-sliced"),), lambda _: calling(partial(reading, without_offset)), number=19, exists=strided
    ),
    fault(
        "output-strides-ignored", "A result that was asked for in column-major memory is written in row-major order."
    )((Cell("matmul-127"),), lambda _: replacing(out=written_across), number=19),
    fault("broadcast-gradient-not-summed", "The gradient of a broadcast operand is that of its first use only.")(
        (Cell("elementwise-broadcast", Mode.BACKWARD), Cell("elementwise-scalar", Mode.BACKWARD)),
        lambda _: backward_kernels(sum=first_alone),
        number=20,
    ),
    fault(
        "overlap-in-place",
        "An operator that reads neighbours runs in place, and reads values that it has just written.",
    )((Cell("elementwise-overlap"),), lambda _: calling(in_place), number=21),
    fault("overlap-in-place-backward", "The backward pass of an operator that reads neighbours runs in place.")(
        (Cell("elementwise-overlap", Mode.BACKWARD),), lambda _: backwards(in_place), number=21
    ),
    fault("input-overwritten", "The caller's input is overwritten.")(
        (Cell("elementwise-5"),), lambda _: calling(overwriting), number=21
    ),
    fault("parameter-overwritten", "A forward pass overwrites a parameter.")(
        (Cell("mlp"),), lambda _: calling(drifting), number=21
    ),
    fault("row-never-written", "The last row of a matrix product is not written.")(
        (Cell("matmul-129"),), lambda _: replacing(out=unwritten), number=22
    ),
    fault("row-never-written-backward", "The last row of the backward pass's matrix products is not written.")(
        (Cell("matmul", Mode.BACKWARD),), lambda _: products(never_written, backward_kernels), number=22
    ),
    fault("nothing-written", "The result is allocated and not written.")(
        (Cell("mlp"),), lambda _: editing(all_unwritten), number=22
    ),
)
