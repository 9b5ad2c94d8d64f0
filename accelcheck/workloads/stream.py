"""Networks called many times, with inputs of other sizes, dtypes and ranks, and with data that decides a branch."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal
from accelcheck.workloads.norm import EmbeddingNormGelu

GAIN = 1.0
"""Global variable that `Centred` reads in every call."""

LENGTHS = (12, 17, 12, 24, 12, 9, 17, 24, 12)
"""Lengths of the inputs of a stream, in which known lengths recur between new ones."""
LONG = 14
"""Length above which inputs take the other branch, in workloads with a branch on the size."""


class Stream(nn.Module):
    """Calls `net` for one input after the other: ``(x, y, ...)`` to ``(net(x), net(y), ...)``."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(x) for x in inputs)


class Centred(nn.Module):
    """A layer, minus the mean of its rows, and a head: ``(n, 8)`` to ``(n, 4)``. The result depends on the size n.

    Args:
        limit: Number of rows above which they are squared; None for no such branch.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 8))
        self.bias = nn.Parameter(torch.empty(6))
        self.head = nn.Parameter(torch.empty(4, 6))
        self.scale = 1.0
        self.limit = limit

    @property
    def paths(self) -> int:
        """Number of branches that a size can choose from."""
        return 1 if self.limit is None else 2

    def forward(self, x: Tensor) -> Tensor:
        size = x.size(0)
        rows = torch.tanh(functional.linear(x, self.weight, self.bias))
        if self.limit is not None and size > self.limit:
            rows = rows * rows
        # The size is a factor here, not a shape: code compiled for another size gives a wrong result without an error.
        out = functional.linear(rows - rows.sum(0) / size, self.head)
        return out * (self.scale * GAIN)


class Signed(nn.Module):
    """A layer, then SiLU where the inputs sum to more than 0, else tanh: ``(n, 8)`` to ``(n, 6)``."""

    paths = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 8))
        self.bias = nn.Parameter(torch.empty(6))

    def forward(self, x: Tensor) -> Tensor:
        rows = functional.linear(x, self.weight, self.bias)
        if x.sum() > 0:
            return functional.silu(rows)
        return torch.tanh(rows)


def _lengths(generator: torch.Generator, extent: int, *, limit: int | None) -> Problem:
    module = initialise(Stream(Centred(limit)), generator)
    return Problem(module, tuple(normal(generator, length, 8) for length in LENGTHS))


def _tokens(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Stream(EmbeddingNormGelu(width=16)), generator)
    shapes: Sequence[tuple[int, ...]] = ((4, 12), (4, 12), (12,), (4, 15), (4, 12), (4, 12))
    dtypes = [torch.int32 if place in {1, 5} else torch.int64 for place in range(len(shapes))]
    pairs = zip(shapes, dtypes, strict=True)
    return Problem(module, tuple(integers(generator, 0, 60, *shape).to(dtype) for shape, dtype in pairs))


def _signs(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Stream(Signed()), generator)
    # All elements of an input are near 1, or near -1: rounding cannot change the sign of their sum.
    return Problem(module, tuple(sign + 0.2 * normal(generator, 10, 8) for sign in (1.0, -1.0, 1.0, -1.0)))


_TRAITS = frozenset({"stream"})

WORKLOADS = (
    Workload("stream-lengths", "A layer and the mean of its rows, called nine times with four lengths.",
        partial(_lengths, limit=None), 3, traits=_TRAITS),
    Workload("stream-sides", "As stream-lengths, with a branch on the length.",
        partial(_lengths, limit=LONG), 3, traits=_TRAITS),
    Workload("stream-tokens",
        "An embedding called with another dtype, another rank and another length, and again with known ones.",
        _tokens, 3, traits=_TRAITS),
    Workload("stream-signs", "A branch on the sum of the input, called four times, twice on each side.",
        _signs, 3, traits=_TRAITS | {"branching"}),
)  # fmt: skip
