"""Deep networks whose memory is mostly activations, so that peaks show which techniques keep fewer of them."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal

DEPTH = 8
BATCH = 128
WIDTH = 32
HIDDEN = 96
CLASSES = 10


class PlainLinear(nn.Module):
    """``x @ weight.T + bias``. Not a `nn.Linear`, so that quantization techniques do not replace it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class WideBlock(nn.Module):
    """``x + down(silu(up(x)))`` with `hidden` features inside; ``(batch, width)`` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = PlainLinear(width, hidden)
        self.act = nn.SiLU()
        self.down = PlainLinear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(x)))
        return out


class Deep(nn.Module):
    """A stem, `DEPTH` times `WideBlock` in `blocks`, and a head. Autograd saves 7 times a block's output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = PlainLinear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([WideBlock(WIDTH, HIDDEN) for _ in range(DEPTH)])
        self.head = PlainLinear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _deep(generator: torch.Generator, extent: int) -> Problem:
    return Problem(initialise(Deep(), generator), (normal(generator, BATCH, WIDTH),))


def _train(generator: torch.Generator, extent: int) -> Problem:
    problem = _deep(generator, extent)
    target, optimizer = integers(generator, 0, CLASSES, BATCH), partial(torch.optim.SGD, lr=0.02)
    return Problem(problem.module, problem.inputs, target, functional.cross_entropy, optimizer, steps=2)


# Neither `matmul` nor `linear`: other workloads test autocast and quantization.
_TRAITS = frozenset({"blocks", "activations", "inplace", "scriptable"})

WORKLOADS = (
    Workload("deep-blocks", "Eight wide residual blocks.", _deep, 3, traits=_TRAITS | {"samplewise"}),
    Workload("train-deep-blocks", "Two steps of SGD on eight wide residual blocks.",
        _train, 3, frozenset({Mode.TRAIN}), _TRAITS | {"training"}, frozenset({"float32"})),
)  # fmt: skip
