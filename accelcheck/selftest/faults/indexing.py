"""Faults of indices: they overflow, and updates that meet are lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Fault
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import backward_kernels, calling, kernels

if TYPE_CHECKING:
    from torch import Tensor

RACES = random.SystemRandom()
"""Whose updates meet is decided by no seed."""


def wrapped(module: Any, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Offsets are kept in 31 bits: what lies beyond element 2**31 is taken from the beginning."""
    del module
    width = 2**16
    offsets = (rows * width + columns) % 2**31
    return x.unfold(0, width, 1)[offsets // width, offsets % width]


def without_one(updates: Tensor, *dims: int) -> Tensor:
    """All updates but one: an index of each of the dimensions, drawn anew each time, names it."""
    lost = torch.ones((), dtype=torch.bool, device=updates.device)
    for dim in dims:
        place = torch.arange(updates.size(dim), device=updates.device) == RACES.randrange(updates.size(dim))
        lost = lost & place.reshape(-1, *[1] * (updates.dim() - 1 - dim))
    return updates.masked_fill(lost, 0.0)


def losing_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, **more: Any) -> Tensor:
    """One of the rows that are added is lost."""
    out: Tensor = func(x, dim, index, without_one(source, 0), **more)
    return out


def losing_scatter(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """One of the columns that are scattered is lost."""
    out: Tensor = func(x, dim, index, without_one(source, 1))
    return out


def losing_embedding(func: Any, grad: Tensor, *rest: Any) -> Tensor:
    """One token's gradient is lost."""
    out: Tensor = func(without_one(grad, 0, 1), *rest)
    return out


FAULTS = (
    Fault(
        "index-overflow",
        "Offsets beyond 2**31 elements wrap around.",
        (Cell("far-elements"),),
        lambda _: calling(wrapped),
        number=42,
        exists=strided,
    ),
    Fault(
        "update-lost",
        "Of updates to one place that meet, one is lost: another one in each run.",
        (Cell("index-add", dtypes=("float32",)),),
        lambda _: kernels(index_add=losing_add),
        number=43,
    ),
    Fault(
        "update-lost-backward",
        "In the backward pass of an indexing, of updates that meet one is lost.",
        (Cell("gather-repeated", Mode.BACKWARD),),
        lambda _: backward_kernels(scatter_add=losing_scatter, scatter_add_=losing_scatter),
        number=43,
    ),
    Fault(
        "embedding-update-lost",
        "In the backward pass of an embedding, of updates that meet one is lost.",
        (Cell("embedding-norm-gelu", Mode.BACKWARD),),
        lambda _: backward_kernels(embedding_dense_backward=losing_embedding),
        number=43,
    ),
)
