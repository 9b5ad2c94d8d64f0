"""Faults of single operators, caught by level 1's case of each class alone; and of indices: overflow, lost updates."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, backward, fault, passes, single, trained
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import (
    Kernel,
    aside,
    backward_kernels,
    calling,
    kernels,
    optimizing,
    rounded_to,
    truncated_to,
)

if TYPE_CHECKING:
    from torch import Tensor


FAR = -80.0
"""End of the range of the planted `exp`; FP32 has exponentials down to -87."""


def _unmoved(index: int) -> Change:
    """Batch norm that leaves a running statistic as it was."""

    def norm(func: Any, *args: Any, **kwargs: Any) -> Any:
        kept = args[index].clone()
        out = func(*args, **kwargs)
        args[index].copy_(kept)
        return out

    names = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
    return kernels(**dict.fromkeys(names, norm))


def _last_wins() -> Change:
    """Keep the last of updates that collide."""

    def scatter_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        func(x.clone(), dim, index, source)
        return x.scatter(dim, index, _last(x, dim, index, source))

    return kernels(scatter_add=scatter_add)


@aside
def _last(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """The value that a scatter in order leaves at each position, so that any winner is the last one."""
    sums = x.clone().scatter_(dim, index, x.gather(dim, index) + source)
    return sums.gather(dim, index)


def _cast(dtype: torch.dtype, change: Any) -> Change:
    """Casts of FP32 to `dtype`, of changed numbers."""

    def cast(func: Kernel, x: Tensor, **kwargs: Any) -> Tensor:
        wrong = kwargs.get("dtype") is dtype and x.dtype == torch.float32
        return func(change(x) if wrong else x, **kwargs)

    return kernels(_to_copy=cast)


def _short(bits: float) -> Change:
    """Square roots have too few significant bits: the strength."""

    def root(func: Any, x: Tensor) -> Tensor:
        return rounded_to(int(bits), func(x))

    return kernels(sqrt=root, rsqrt=root)


def _flushed(func: Any, x: Tensor) -> Tensor:
    """An exponential that is 0 where the result is small."""
    out: Tensor = func(x)
    return torch.where(x < FAR, torch.zeros_like(out), out)


def _running(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Sums and means are accumulated in half precision. For FP32 it is bfloat16."""
    if not x.is_floating_point():
        whole: Tensor = func(x, *args, **kwargs)
        return whole
    dims = args[0] if args else kwargs.get("dim")
    func(x, *args, **kwargs)
    return _accumulated(x, None if dims is None else tuple(dims), mean="mean" in func.name())


@aside
def _accumulated(x: Tensor, dims: tuple[int, ...] | None, *, mean: bool) -> Tensor:
    (dim,) = dims if dims is not None else (0,)
    short = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    total = torch.zeros_like(x.select(dim, 0), dtype=short)
    for part in x.unbind(dim):
        total = (total.float() + part.float()).to(short)
    return (total.float() / (x.shape[dim] if mean else 1)).to(x.dtype)


def _in_storage_order(func: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """A copy of a transposed matrix has the order of the memory that it reads."""
    out: Tensor = func(x, **kwargs)
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) > 1 and out.is_contiguous():
        out.copy_(x.t().reshape(x.shape))
    return out


def _shifted(shift: float) -> Change:
    """Normal numbers have another mean: the strength."""

    def normal(func: Kernel, x: Tensor, **kwargs: Any) -> Tensor:
        return func(x, **kwargs) + shift

    return kernels(randn_like=normal)


def _narrowed(part: float) -> Change:
    """Uniform numbers leave out a part of [0, 1) next to 0: the strength."""

    def uniform(func: Kernel, x: Tensor, **kwargs: Any) -> Tensor:
        return func(x, **kwargs) * (1 - part) + part

    return kernels(rand_like=uniform)


def _short_product(func: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """A product leaves out the last term of each sum."""
    func(a, b)
    return func(a[..., :-1], b[..., :-1, :])


def _with_eps(eps: float) -> Change:
    """AdamW takes another eps: the strength for 1e-3."""
    make = partial(torch.optim.AdamW, lr=1e-2, betas=(0.875, 0.96875), weight_decay=0.1)
    return optimizing(lambda parameters: make(parameters, eps=eps))


RACES = random.SystemRandom()
"""Generator without a seed, which decides the lost update."""


def wrapped(module: Any, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Offsets beyond 2**31 elements wrap around. They have 31 bits."""
    width = 2**16
    offsets = (rows * width + columns) % 2**31
    return x.unfold(0, width, 1)[offsets // width, offsets % width]


def without_one(updates: Tensor, *dims: int) -> Tensor:
    """Drops one update, given by one index of each dimension, drawn anew each time."""
    lost = torch.ones((), dtype=torch.bool, device=updates.device)
    for dim in dims:
        place = torch.arange(updates.size(dim), device=updates.device) == RACES.randrange(updates.size(dim))
        lost = lost & place.reshape(-1, *[1] * (updates.dim() - 1 - dim))
    return updates.masked_fill(lost, 0.0)


def losing_add(func: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
    """One of several updates to the same place is lost: a different one in each run."""
    return func(x, dim, index, without_one(source, 0), **more)


def losing_scatter(func: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Loses one of the columns that are scattered."""
    return func(x, dim, index, without_one(source, 1))


def losing_embedding(func: Kernel, grad: Tensor, *rest: Any) -> Tensor:
    """In the backward pass of an embedding one of several updates to the same place is lost."""
    return func(without_one(grad, 0, 1), *rest)


FAULTS = (
    fault("product-without-last-term", _short_product)(
        passes("product-alone"), lambda _: kernels(mm=_short_product, bmm=_short_product)
    ),
    fault("reduction-in-half-precision", _running)(Cell("reductions"), lambda _: kernels(sum=_running, mean=_running)),
    fault("running-mean-not-updated", "Batch norm never updates its running mean.")(
        single("batch-norm", Mode.BACKWARD), lambda _: _unmoved(3)
    ),
    fault("running-variance-not-updated", "Batch norm never updates its running variance.")(
        single("batch-norm", Mode.BACKWARD), lambda _: _unmoved(4)
    ),
    fault("scatter-keeps-the-last", "Of updates that collide in a scatter-add, one alone arrives.")(
        passes("scatter-gather", FLOAT32), lambda _: _last_wins()
    ),
    fault("cast-truncates", "A cast to bfloat16 truncates.")(
        single("casts"), lambda _: _cast(torch.bfloat16, partial(truncated_to, 8))
    ),
    fault("cast-rounds-to-integers", "A cast to int32 rounds to nearest, not towards 0.")(
        single("casts"), lambda _: _cast(torch.int32, torch.round)
    ),
    fault("root-in-low-precision")(single("roots-exponentials"), _short, (11.0, 16.0, 20.0)),
    fault("exponential-ends-early", f"Exponentials are 0 below {FAR:g}.")(
        single("roots-exponentials"), lambda _: kernels(exp=_flushed)
    ),
    fault("optimizer-eps")(trained("optimizer-steps"), _with_eps, (1e-8, 2e-3, 1.01e-3)),
    fault("copy-in-storage-order", _in_storage_order)(
        Cell("copies"), lambda _: kernels(clone=_in_storage_order), exists=strided
    ),
    fault("normal-mean-shifted")(single("random-numbers", Mode.RANDOM), _shifted, (0.2, 0.05)),
    fault("uniform-not-to-the-end")(single("random-numbers", Mode.RANDOM), _narrowed, (0.05, 0.01)),
    fault("index-overflow", wrapped)(Cell("far-elements"), lambda _: calling(wrapped), number=42, exists=strided),
    fault("update-lost", losing_add)(single("index-add"), lambda _: kernels(index_add=losing_add), number=43),
    fault(
        "update-lost-backward", "In the backward pass of an indexing one of several updates to the same place is lost."
    )(
        backward("gather-repeated"),
        lambda _: backward_kernels(scatter_add=losing_scatter, scatter_add_=losing_scatter),
        number=43,
    ),
    fault("embedding-update-lost", losing_embedding)(
        backward("embedding-norm-gelu"),
        lambda _: backward_kernels(embedding_dense_backward=losing_embedding),
        number=43,
    ),
)
