"""Slicing and indexing. Nothing is computed, so the result is exact, unless gradients of repeated indices add up."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, normal, orders


class Slicing(nn.Module):
    """Even columns, then odd ones, of the last rows, then of the first: ``(rows, columns)``, each element once."""

    def forward(self, x: Tensor) -> Tensor:
        rolled = torch.cat([x[-5:], x[:-5]])
        return torch.cat([rolled[:, ::2], rolled[..., 1::2]], dim=1)


class AdvancedIndexing(nn.Module):
    """``x[rows, columns]`` with two index tensors that broadcast."""

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return x[rows.unsqueeze(-1), columns]


class IndexSelect(nn.Module):
    """Columns by an index tensor."""

    def forward(self, x: Tensor, columns: Tensor) -> Tensor:
        return torch.index_select(x, 1, columns)


class Gather(nn.Module):
    """Of each row the elements that an index tensor names."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, 1, index)


def _slicing(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Slicing(), (normal(generator, 20 + extent, 30),))


def _advanced(generator: torch.Generator, extent: int) -> Problem:
    rows, columns = 20 + extent, 30
    x = normal(generator, rows, columns)
    return Problem(AdvancedIndexing(), (x, orders(generator, rows)[:-4], orders(generator, columns)[:16]))


def _select(generator: torch.Generator, extent: int) -> Problem:
    return Problem(IndexSelect(), (normal(generator, 20 + extent, 30), orders(generator, 30)[:16]))


def _gather(generator: torch.Generator, extent: int, *, repeated: bool) -> Problem:
    rows, columns = 20 + extent, 30
    x = normal(generator, rows, columns)
    if repeated:
        return Problem(Gather(), (x, integers(generator, 0, columns, rows, 2 * columns)))
    return Problem(Gather(), (x, orders(generator, rows, columns)[:, :16].contiguous()))


_TRAITS = frozenset({"scriptable", "resizable"})
_EXACT = _TRAITS | {"exact"}

WORKLOADS = (
    Workload("slicing", "Basic slices with steps and negative bounds, concatenated.", _slicing, 2, traits=_EXACT),
    Workload("advanced-indexing", "Two index tensors that broadcast; no element twice.", _advanced, 2, traits=_EXACT),
    Workload("index-select", "Some columns in another order.", _select, 2, traits=_EXACT),
    Workload("gather", "Other elements of each row; none twice.", partial(_gather, repeated=False), 2, traits=_EXACT),
    Workload(
        "gather-repeated",
        "Elements taken several times, whose gradients add up.",
        partial(_gather, repeated=True),
        2,
        traits=_TRAITS,
    ),
)
