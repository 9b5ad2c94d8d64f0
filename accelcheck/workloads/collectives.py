"""Collectives: every rank's result, computed by one process from all ranks' tensors, many in one bundle."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.function_parts import Functions

ROWS, WIDTH = 4, 37
"""Shape of each rank's tensor: a row for each of up to four ranks, of no whole number of vectors."""
REDUCTIONS: dict[str, Any] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum
}  # fmt: skip


def uneven(sender: int, receiver: int) -> int:
    """Returns the number of elements of a row that one rank sends another; some send none."""
    return (9 * sender + 13 * receiver) % 31 if sender != receiver + 1 else 0


@dataclass(frozen=True)
class Collective:
    """One call, or several at once, from the tensors of all ranks, ``(world, ROWS, WIDTH)``, to each rank's result.

    `kind` is a key of `RESULTS`, and `op` the reduction, if any. Tensors are cast to `dtype` first, if it is given. The
    form is ``transposed``, ``uneven``, ``stacked``, ``groups``, ``asynchronous``, or plain. `root` acts alone.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    form: str = ""
    root: int = 0

    @property
    def label(self) -> str:
        """Label in a bundle."""
        return " ".join(
            filter(None, (self.kind, self.op, self.dtype, self.form, f"root {self.root}" * (self.root > 0)))
        )

    def own(self, x: Tensor) -> Tensor:
        """Returns tensors as they are exchanged: in their dtype, and transposed where that is the form."""
        x = x.to(getattr(torch, self.dtype)) if self.dtype else x
        return x.transpose(-1, -2) if self.form == "transposed" else x

    def reduced(self, *tensors: Tensor) -> Tensor:
        """Reduces one tensor of each rank, in the order of the ranks."""
        total: Tensor = functools.reduce(REDUCTIONS[self.op], tensors)
        return total / len(tensors) if self.op == "avg" else total

    def cut(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """Returns as many elements of a row as one rank sends another, or the whole row."""
        return tensor[: uneven(sender, receiver)] if self.form == "uneven" else tensor

    def parts(self, tensor: Tensor, world: int) -> Sequence[Tensor]:
        """Returns the part of a rank's tensor for each rank: a row, or as many elements as make all of them."""
        return tensor.flatten().tensor_split(world) if self.form == "uneven" else tensor.unbind(0)[:world]

    def __call__(self, x: Tensor) -> list[list[Tensor]]:
        ranks = self.own(x).unbind(0)
        return [list(RESULTS[self.kind](self, ranks, rank)) for rank in range(len(ranks))]


def _all_reduce(call: Collective, ranks: Sequence[Tensor], rank: int) -> list[Tensor]:
    if call.form != "groups":
        return [call.reduced(*ranks)]
    return [call.reduced(ranks[rank], ranks[(rank + 1) % len(ranks)]), call.reduced(ranks[rank - 1], ranks[rank])]


RESULTS: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "reduce": lambda call, ranks, rank: [call.reduced(*ranks)] * (rank == call.root),
    "reduce_scatter": lambda call, ranks, rank: [call.reduced(*(call.parts(x, len(ranks))[rank] for x in ranks))],
    "all_gather": lambda call, ranks, _: [
        call.cut(x.flatten() if call.form == "uneven" else x, sender, 0) for sender, x in enumerate(ranks)
    ],
    "all_to_all": lambda call, ranks, rank: [call.cut(x[rank], sender, rank) for sender, x in enumerate(ranks)],
    "broadcast": lambda call, ranks, _: [ranks[call.root]],
    "scatter": lambda call, ranks, rank: [ranks[call.root][rank]],
    "gather": lambda call, ranks, rank: ranks if rank == call.root else [],
    "send": lambda _, ranks, rank: [ranks[rank - 1], ranks[(rank + 1) % len(ranks)]],
}
"""Result of one rank by the kind of collective. `send` is to both neighbours."""

_EXACT = ("int64", "int32", "int8", "uint8", "bool", "float64")
_ADDED = [(dtype, op) for dtype in ("", "float64", "int64", "int32", "uint8") for op in REDUCTIONS]


def _reductions(kind: str, *more: tuple[str, str]) -> list[Collective]:
    plain = [Collective(kind, op, dtype) for dtype, op in _ADDED if op != "avg" or dtype in {"", "float64"}]
    return [*plain, *(Collective(kind, op, form=form) for op, form in (("sum", "transposed"), *more))]


def _moves(kind: str, *forms: str) -> list[Collective]:
    plain = (Collective(kind, form=form) for form in ("", "transposed", *forms))
    return [*plain, *(Collective(kind, dtype=dtype) for dtype in _EXACT)]


BUNDLES = {
    "all-reduce": _reductions(
        "all_reduce", ("sum", "groups"), ("max", "groups"), ("sum", "asynchronous"), ("avg", "asynchronous")
    ),
    "reduce-scatter": _reductions("reduce_scatter", ("sum", "uneven")),
    "all-gather": _moves("all_gather", "stacked", "uneven"),
    "all-to-all": _moves("all_to_all", "uneven"),
    "broadcast": [
        *_moves("broadcast"),
        *(Collective(kind, root=root) for kind in ("broadcast", "scatter", "gather") for root in (1, 2)),
        *(Collective("reduce", op, root=root) for op, root in (("sum", 0), ("max", 1), ("product", 2))),
    ],
    "point-to-point": _moves("send"),
}
"""Collectives of each bundle."""


def _bundle(generator: torch.Generator, extent: int, *, name: str, world: int) -> Problem:
    numbers = normal(generator, world, ROWS, WIDTH), integers(generator, 0, 5, world, ROWS, WIDTH)
    whole = frozenset(_EXACT) - {"float64"}
    return Problem(Functions(tuple((part.label, part, (int(part.dtype in whole),)) for part in BUNDLES[name])), numbers)


WORKLOADS = tuple(
    Workload(f"{name}-{world}",
        f"Results of {len(BUNDLES[name])} calls of {name} between {world} ranks: dtypes, reductions, layouts, sizes.",
        partial(_bundle, name=name, world=world), world - 2, frozenset({Mode.FORWARD}), frozenset({"domain"}),
        techniques=frozenset({f"collectives-{world}"}), divisible=True)
    for world in (3, 4)
    for name in BUNDLES
)  # fmt: skip
