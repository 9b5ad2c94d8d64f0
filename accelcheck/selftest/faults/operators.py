"""Faults of single operators, caught by level 1's case of each class alone; and of indices: overflow, lost updates."""

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults import plant
from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, backward, derived, fault, passes, single, trained
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import Kernel, always, aside, backward_kernels, calling, kernel, kernels

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


@always(kernel("scatter_add"))
def _last_wins(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Keep the last of updates that collide."""
    func(x.clone(), dim, index, source)
    return x.scatter(dim, index, _last(x, dim, index, source))


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
    return kernel("sqrt", "rsqrt")(lambda func, x: plant.rounded_to(int(bits), func(x)))


@always(kernel("exp"))
def _flushed(func: Any, x: Tensor) -> Tensor:
    """An exponential that is 0 where the result is small."""
    out: Tensor = func(x)
    return torch.where(x < FAR, torch.zeros_like(out), out)


@always(kernel("sum", "mean"))
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


@always(kernel("clone"))
def _in_storage_order(func: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """A copy of a transposed matrix has the order of the memory that it reads."""
    out: Tensor = func(x, **kwargs)
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) > 1 and out.is_contiguous():
        out.copy_(x.t().reshape(x.shape))
    return out


def _shifted(shift: float) -> Change:
    """Normal numbers have another mean: the strength."""
    return kernels(randn_like=lambda func, x, **kwargs: func(x, **kwargs) + shift)


def _narrowed(part: float) -> Change:
    """Uniform numbers leave out a part of [0, 1) next to 0: the strength."""
    return kernels(rand_like=lambda func, x, **kwargs: func(x, **kwargs) * (1 - part) + part)


@always(kernel("mm", "bmm"))
def _short_product(func: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """A product leaves out the last term of each sum."""
    func(a, b)
    return func(a[..., :-1], b[..., :-1, :])


def _with_eps(eps: float) -> Change:
    """AdamW takes another eps: the strength for 1e-3."""
    make = partial(torch.optim.AdamW, lr=1e-2, betas=(0.875, 0.96875), weight_decay=0.1)
    return plant.optimizing(lambda parameters: make(parameters, eps=eps))


RACES = random.SystemRandom()
"""Generator without a seed, which decides the lost update."""


@always(calling)
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


@always(kernel("index_add"))
def losing_add(func: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
    """One of several updates to the same place is lost: a different one in each run."""
    return func(x, dim, index, without_one(source, 0), **more)


@always(kernel("scatter_add", "scatter_add_", plant=backward_kernels))
def losing_scatter(func: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """In the backward pass of an indexing one of several updates to the same place is lost. It is a column."""
    return func(x, dim, index, without_one(source, 1))


@always(kernel("embedding_dense_backward", plant=backward_kernels))
def losing_embedding(func: Kernel, grad: Tensor, *rest: Any) -> Tensor:
    """In the backward pass of an embedding one of several updates to the same place is lost."""
    return func(without_one(grad, 0, 1), *rest)


FAULTS = (
    fault("product-without-last-term")(passes("product-alone"), _short_product),
    fault("reduction-in-half-precision")(Cell("reductions"), _running),
    fault("running-mean-not-updated", "Batch norm never updates its running mean.")(
        derived("batch-norm"), lambda _: _unmoved(3)
    ),
    fault("running-variance-not-updated", "Batch norm never updates its running variance.")(
        derived("batch-norm"), lambda _: _unmoved(4)
    ),
    fault("scatter-keeps-the-last", "Of updates that collide in a scatter-add, one alone arrives.")(
        passes("scatter-gather", FLOAT32), _last_wins
    ),
    fault("cast-truncates", "A cast to bfloat16 truncates.")(
        single("casts"), lambda _: _cast(torch.bfloat16, partial(plant.truncated_to, 8))
    ),
    fault("cast-rounds-to-integers", "A cast to int32 rounds to nearest, not towards 0.")(
        single("casts"), lambda _: _cast(torch.int32, torch.round)
    ),
    fault("root-in-low-precision")(single("roots-exponentials"), _short, (11.0, 16.0, 20.0)),
    fault("exponential-ends-early", f"Exponentials are 0 below {FAR:g}.")(single("roots-exponentials"), _flushed),
    fault("optimizer-eps")(trained("optimizer-steps"), _with_eps, (1e-8, 2e-3, 1.01e-3)),
    fault("copy-in-storage-order")(Cell("copies"), _in_storage_order, exists=strided),
    fault("normal-mean-shifted")(single("random-numbers", Mode.RANDOM), _shifted, (0.2, 0.05)),
    fault("uniform-not-to-the-end")(single("random-numbers", Mode.RANDOM), _narrowed, (0.05, 0.01)),
    fault("index-overflow")(Cell("far-elements"), wrapped, number=42, exists=strided),
    fault("update-lost")(single("index-add"), losing_add, number=43),
    fault("update-lost-backward")(backward("gather-repeated"), losing_scatter, number=43),
    fault("embedding-update-lost")(backward("embedding-norm-gelu"), losing_embedding, number=43),
)
