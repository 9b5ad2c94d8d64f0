"""Faults of indices: overflow, and lost updates where several go to one place."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, fault, single
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import Kernel, backward_kernels, calling, kernels

if TYPE_CHECKING:
    from torch import Tensor

RACES = random.SystemRandom()
"""No seed decides which of several updates is lost."""


def wrapped(module: Any, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Offsets have 31 bits, so elements beyond 2**31 are read from the beginning."""
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
    """Loses one of the rows that are added."""
    return func(x, dim, index, without_one(source, 0), **more)


def losing_scatter(func: Kernel, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Loses one of the columns that are scattered."""
    return func(x, dim, index, without_one(source, 1))


def losing_embedding(func: Kernel, grad: Tensor, *rest: Any) -> Tensor:
    """Loses one token's gradient."""
    return func(without_one(grad, 0, 1), *rest)


FAULTS = (
    fault("index-overflow", "Offsets beyond 2**31 elements wrap around.")(
        (Cell("far-elements"),), lambda _: calling(wrapped), number=42, exists=strided
    ),
    fault("update-lost", "One of several updates to the same place is lost: a different one in each run.")(
        (single("index-add"),), lambda _: kernels(index_add=losing_add), number=43
    ),
    fault(
        "update-lost-backward", "In the backward pass of an indexing one of several updates to the same place is lost."
    )(
        (Cell("gather-repeated", Mode.BACKWARD),),
        lambda _: backward_kernels(scatter_add=losing_scatter, scatter_add_=losing_scatter),
        number=43,
    ),
    fault(
        "embedding-update-lost",
        "In the backward pass of an embedding one of several updates to the same place is lost.",
    )(
        (Cell("embedding-norm-gelu", Mode.BACKWARD),),
        lambda _: backward_kernels(embedding_dense_backward=losing_embedding),
        number=43,
    ),
)
