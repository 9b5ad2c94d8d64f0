"""Collectives: every rank's result, computed by one process from all ranks' tensors, many in one bundle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.families import Functions

ROWS, WIDTH = 4, 37
"""Shape of a tensor that ranks exchange a row of with each of up to four ranks: no multiple of a vector."""

REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def uneven(sender: int, receiver: int) -> int:
    """Returns the number of elements of a row that one rank sends another; some send none."""
    return (9 * sender + 13 * receiver) % 31 if sender != receiver + 1 else 0


@dataclass(frozen=True)
class Collective:
    """One call, or several at once, from the tensors of all ranks, ``(world, ROWS, WIDTH)``, to each rank's result.

    Attributes:
        kind: Name of a method, here as well as in the ranks: ``all_reduce``.
        op: Reduction; empty where nothing is computed.
        dtype: Dtype to which tensors are cast before; empty for their own.
        form: Way in which it is called: ``transposed``, ``uneven``, ``stacked``, ``groups``, ``asynchronous``; empty for plainly.
        root: Rank that sends or receives alone.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    form: str = ""
    root: int = 0

    @property
    def label(self) -> str:
        """Label in a bundle."""
        root = f"root {self.root}" if self.root else ""
        return " ".join(filter(None, (self.kind.replace("_", "-"), self.op, self.dtype, self.form, root)))

    def own(self, x: Tensor) -> Tensor:
        """Returns tensors as they are exchanged: in their dtype, and transposed where that is the form."""
        x = x.to(getattr(torch, self.dtype)) if self.dtype else x
        return x.transpose(-1, -2) if self.form == "transposed" else x

    def reduced(self, tensors: Sequence[Tensor]) -> Tensor:
        """Reduces one tensor of each rank, in the order of the ranks."""
        total = functools.reduce(REDUCTIONS[self.op], tensors)
        return total / len(tensors) if self.op == "avg" else total

    def __call__(self, x: Tensor) -> list[list[Tensor]]:
        ranks = self.own(x).unbind(0)
        return [list(getattr(self, self.kind)(ranks, rank, len(ranks))) for rank in range(len(ranks))]

    def all_reduce(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the reduction over all ranks or, in groups of neighbours, over the rank and each neighbour."""
        if self.form == "groups":
            yield self.reduced([ranks[rank], ranks[(rank + 1) % world]])
            yield self.reduced([ranks[rank - 1], ranks[rank]])
        else:
            yield self.reduced(ranks)

    def reduce(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the reduction on one rank."""
        if rank == self.root:
            yield self.reduced(ranks)

    def reduce_scatter(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the rank's part of the reduction."""
        yield self.reduced([self.parts(tensor, world)[rank] for tensor in ranks])

    def parts(self, tensor: Tensor, world: int) -> Sequence[Tensor]:
        """Returns the part of a rank's tensor for each rank: a row, or as many elements as make all of them."""
        return tensor.flatten().tensor_split(world) if self.form == "uneven" else tensor.unbind(0)[:world]

    def all_gather(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields every rank's tensor, or as many of its elements as it sends the next one."""
        for sender, tensor in enumerate(ranks):
            yield tensor.flatten()[: uneven(sender, 0)] if self.form == "uneven" else tensor

    def all_to_all(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the row that each rank has for this one, or as many of its elements as it sends."""
        for sender, tensor in enumerate(ranks):
            yield tensor[rank, : uneven(sender, rank)] if self.form == "uneven" else tensor[rank]

    def broadcast(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the root's tensor."""
        yield ranks[self.root]

    def scatter(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the root's row for this rank."""
        yield ranks[self.root][rank]

    def gather(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields every rank's tensor on the root."""
        if rank == self.root:
            yield from ranks

    def send(self, ranks: Sequence[Tensor], rank: int, world: int) -> Iterator[Tensor]:
        """Yields the tensors of the rank before and of the rank after."""
        yield ranks[rank - 1]
        yield ranks[(rank + 1) % world]


_FORMS = ("", "transposed")
_EXACT = ("int64", "int32", "int8", "uint8", "bool", "float64")
_ADDED = [
    *(("", op) for op in REDUCTIONS),
    *((dtype, op) for dtype in ("float64", "int64", "int32", "uint8") for op in REDUCTIONS if op != "avg"),
    ("float64", "avg"),
]


def _reductions(kind: str, *more: Collective) -> tuple[Collective, ...]:
    return (*(Collective(kind, op, dtype) for dtype, op in _ADDED), Collective(kind, "sum", form="transposed"), *more)


def _moves(kind: str, *more: Collective) -> tuple[Collective, ...]:
    plain = (Collective(kind, form=form) for form in _FORMS)
    return (*plain, *(Collective(kind, dtype=dtype) for dtype in _EXACT), *more)


BUNDLES: Mapping[str, tuple[Collective, ...]] = {
    "all-reduce": _reductions(
        "all_reduce",
        *(Collective("all_reduce", op, form="groups") for op in ("sum", "max")),
        *(Collective("all_reduce", op, form="asynchronous") for op in ("sum", "avg")),
    ),
    "reduce-scatter": _reductions("reduce_scatter", Collective("reduce_scatter", "sum", form="uneven")),
    "all-gather": _moves("all_gather", *(Collective("all_gather", form=form) for form in ("stacked", "uneven"))),
    "all-to-all": _moves("all_to_all", Collective("all_to_all", form="uneven")),
    "broadcast": (
        *_moves("broadcast", *(Collective("broadcast", root=root) for root in (1, 2))),
        *(Collective(kind, root=root) for kind in ("scatter", "gather") for root in (0, 1)),
        *(Collective("reduce", op, root=root) for op, root in (("sum", 0), ("max", 1), ("product", 2))),
    ),
    "point-to-point": _moves("send"),
}
"""Collectives of each bundle."""


def _bundle(generator: torch.Generator, extent: int, *, name: str, world: int) -> Problem:
    numbers = normal(generator, world, ROWS, WIDTH), integers(generator, 0, 5, world, ROWS, WIDTH)
    parts = BUNDLES[name]
    whole = frozenset(_EXACT) - {"float64"}
    return Problem(Functions(tuple((part.label, part, (int(part.dtype in whole),)) for part in parts)), numbers)


WORKLOADS = tuple(
    Workload(
        f"{name}-{world}",
        f"Results of {len(BUNDLES[name])} calls of {name} between {world} ranks: dtypes, reductions, layouts, sizes.",
        partial(_bundle, name=name, world=world),
        world - 2,
        frozenset({Mode.FORWARD}),
        frozenset({"domain"}),
        techniques=frozenset({f"collectives-{world}"}),
        divisible=True,
    )
    for world in (3, 4)
    for name in BUNDLES
)
