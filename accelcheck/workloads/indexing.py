"""Slicing and indexing: results are exact copies, except where repeated indices are summed."""

from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, normal, of_normal, orders


class Slicing(nn.Module):
    """A permutation of ``x (rows, columns)``: the last rows first, even columns before odd ones."""

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
    """Elements of each row, selected by an index tensor."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, 1, index)


class IndexAdd(nn.Module):
    """Rows of ``source (R, C)`` added to rows of ``x`` that an index tensor selects, most of them many times."""

    def forward(self, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return torch.index_add(x, 0, index, source)


class FarElements(nn.Module):
    """Elements of a view of 2**32 elements without memory, whose rows are windows of ``x (2**17 - 1,)``."""

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return x.unfold(0, 65536, 1)[rows, columns]  # not 2**16, which TorchScript types as a float


def _index_add(generator: torch.Generator, extent: int) -> Problem:
    rows = 192 + extent
    index = integers(generator, 0, 12, rows)
    return Problem(IndexAdd(), (normal(generator, 12, 8), index, normal(generator, rows, 8)))


def _far(generator: torch.Generator, extent: int) -> Problem:
    rows, columns = (integers(generator, 2**15, 2**16, 24) for _ in range(2))
    rows[0] = columns[0] = 2**16 - 1
    return Problem(FarElements(), (normal(generator, 2**17 - 1), rows, columns))


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
_BRACKETS, _OPERATORS = frozenset({"index-tensors"}), frozenset({"index-operators"})

_PROBES = frozenset({"nan[0]", "inf[0]", "-inf[0]", "one-hot", "scaled"})

WORKLOADS = (
    Workload("slicing", "Basic slices with steps and negative bounds, concatenated.",
        partial(of_normal, make=Slicing, shape=(20, 30)), 2, traits=_EXACT, probes=_PROBES),
    Workload("advanced-indexing", "Two index tensors that broadcast; no element twice.",
        _advanced, 2, traits=_EXACT | _BRACKETS, probes=_PROBES),
    Workload("index-select", "A selection of columns, in another order.",
        _select, 2, traits=_EXACT | _OPERATORS, probes=_PROBES),
    Workload("gather", "A selection of elements of each row; none twice.",
        partial(_gather, repeated=False), 2, traits=_EXACT | _OPERATORS, probes=_PROBES),
    # The view's gradient would take 16 GiB.
    Workload("far-elements", "The last elements of a view of 2**32 elements, whose offsets do not fit into 31 bits.",
        _far, 3, frozenset({Mode.FORWARD}), frozenset({"scriptable", "exact"}) | _BRACKETS,
        features=frozenset({"strided"})),
    # In half precision, atomic additions round after each update, and no technique promises better.
    Workload("index-add", "Many rows added to few, so that updates collide.",
        _index_add, 2, traits=_TRAITS, dtypes=frozenset({"float32"}), probes=frozenset({"ones", "scaled"})),
    Workload("gather-repeated", "Elements selected several times, whose gradients are summed.",
        partial(_gather, repeated=True), 2, traits=_TRAITS | _OPERATORS, probes=_PROBES),
)  # fmt: skip
