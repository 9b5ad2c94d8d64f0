"""Matrix product, bias and ReLU: nominal size, sizes around a tile, empty, and inputs with various strides."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal, plant, separated


class Affine(nn.Module):
    """Holds ``weight (K, N)``, which is not transposed as in `nn.Linear`, and ``bias (N,)``."""

    def __init__(self, inner: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inner, columns))
        self.bias = nn.Parameter(torch.empty(columns))

    def draw(self, generator: torch.Generator) -> None:
        """Draws the parameters."""
        with torch.no_grad():
            plant(self.weight.t(), generator)
            self.bias.copy_(0.1 * normal(generator, len(self.bias)))


class MatmulBiasRelu(Affine):
    """``relu(x @ weight + bias)``: ``x (..., K)`` to ``(..., N)``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight + self.bias)


class MatmulBiasReluTotal(Affine):
    """`MatmulBiasRelu` with a second output ``(N,)``, the sum over rows plus bias, which is not empty without rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.relu(x @ self.weight + self.bias)
        return out, out.sum(0) + self.bias


class Product(nn.Module):
    """``x @ weight``, with `total` summed over rows: ``(rows, K)`` to ``(rows, N)`` or ``(N,)``."""

    __constants__ = ("total",)

    def __init__(self, inner: int, columns: int, *, total: bool = False) -> None:
        super().__init__()
        self.total = total
        self.weight = nn.Parameter(torch.empty(inner, columns))

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out.sum(0) if self.total else out


def _long(generator: torch.Generator, extent: int) -> Problem:
    module = Product(4097, 8)
    with torch.no_grad():
        module.weight.copy_(1.0 + 0.05 * normal(generator, 4097, 8))
    x = 1.0 + 0.05 * normal(generator, 4 + extent, 4097)
    x[:, 0] = 2048.0  # in FP16, 2048 + 1 is 2048
    return Problem(module, (x,))


def _total(generator: torch.Generator, extent: int) -> Problem:
    module = Product(8, 8, total=True)
    with torch.no_grad():
        module.weight.copy_(0.125 + 0.01 * normal(generator, 8, 8))
    # 4096 terms of about 1: a sum in FP16 would stop at 2048.
    return Problem(module, (1.0 + 0.05 * normal(generator, 4096 + extent, 8),))


def _transposed(generator: torch.Generator, rows: int, inner: int) -> Tensor:
    return separated(generator, inner, rows).t()


def _sliced(generator: torch.Generator, rows: int, inner: int) -> Tensor:
    # Every third row of a wider matrix, from its column 3 on: an offset, and rows that are far apart.
    return separated(generator, 3 * rows, inner + 8)[::3, 3 : 3 + inner]


def _expanded(generator: torch.Generator, rows: int, inner: int) -> Tensor:
    # A batch of three that share one matrix in memory; their gradients must not.
    return separated(generator, rows, inner).expand(3, rows, inner)


def _problem(
    generator: torch.Generator,
    extent: int,
    *,
    sizes: tuple[int, int, int] = (64, 96, 80),
    draw: Callable[[torch.Generator, int, int], Tensor] = separated,
    resizable: bool = True,
    kind: type[Affine] = MatmulBiasRelu,
) -> Problem:
    rows, inner, columns = sizes
    module = kind(inner, columns)
    module.draw(generator)
    return Problem(module, (draw(generator, rows + extent if resizable else rows, inner),))


_fixed = partial(_problem, resizable=False)
_TRAITS = frozenset({"matmul", "scriptable"})
_RESIZABLE = _TRAITS | {"resizable"}

_PROBES = frozenset(
    {"zeros", "ones", "one-hot", "powers", "channels", "midpoints", "cancel", "nan[0]", "inf[0]", "-inf[0]"}
)

WORKLOADS = (
    Workload("matmul", "Matrix product, bias and ReLU, 64x96x80.",
        _problem, 1, traits=_RESIZABLE, probes=_PROBES | {"slice"}),
    Workload("matmul-127", "Each size one less than a tile of 128: shows stale or masked tails.",
        partial(_fixed, sizes=(127,) * 3), 2, traits=_TRAITS, probes=_PROBES),
    Workload("matmul-129", "Each size one more than a tile of 128: the last tile has one row.",
        partial(_fixed, sizes=(129,) * 3), 2, traits=_TRAITS, probes=_PROBES),
    Workload("matmul-one", "One row, inner size 1.",
        partial(_fixed, sizes=(1, 1, 80)), 2, traits=_TRAITS, probes=_PROBES),
    Workload("matmul-empty", "No rows: an empty output, a sum over nothing, and a weight gradient of zeros.",
        partial(_fixed, sizes=(0, 96, 80), kind=MatmulBiasReluTotal), 2, traits=_TRAITS),
    Workload("matmul-long", "4096 terms of about 1 after one of 2048.",
        _long, 3, traits=_RESIZABLE, probes=frozenset({"cancel"})),
    # PJRT's CPU client accumulates half precision in half precision.
    Workload("matmul-total",
        "The sum over 4096 rows of a matrix product, each about 1, which autocast must accumulate in float32.",
        _total, 3, traits=_RESIZABLE, dtypes=frozenset({"float32"})),
    *(
        Workload(name, summary, partial(_problem, draw=draw), 2, traits=_RESIZABLE, probes=_PROBES | further)
        for name, summary, draw, further in (
            ("matmul-transposed", "A column-major input.", _transposed, {"slice"}),
            ("matmul-sliced", "An input with an offset and row stride 312.", _sliced, {"slice"}),
            ("matmul-expanded", "An input with stride 0: a batch of one matrix.", _expanded, frozenset[str]()),
        )
    ),
)  # fmt: skip
