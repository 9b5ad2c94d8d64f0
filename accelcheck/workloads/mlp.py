"""Multi-layer perceptrons: plain, residual blocks, and trained."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, learned, of_normal, separated


class Mlp(nn.Module):
    """Linear, ReLU, Linear, ReLU, Linear: ``(batch, features)`` to ``(batch, classes)``."""

    def __init__(self, features: int = 48, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(hidden, hidden)
        self.relu2 = nn.ReLU()
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.fc1(x))
        x = self.relu2(self.fc2(x))
        out: Tensor = self.fc3(x)
        return out


class MlpBlock(nn.Module):
    """``x + fc2(gelu(fc1(norm(x))))``, pre-normalised; ``(..., width)`` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm(x))))
        return out


class ResidualMlp(nn.Module):
    """Three `MlpBlock` in `blocks`, and a head."""

    def __init__(self, width: int = 32, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MlpBlock(width, hidden) for _ in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _mlp(generator: torch.Generator, extent: int) -> Problem:
    return Problem(initialise(Mlp(), generator, relu=True), (separated(generator, 32 + extent, 48),))


def _train(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Mlp(), generator, relu=True)
    batch = 32 + extent
    return learned(module, separated(generator, batch, 48), integers(generator, 0, 10, batch), rate=0.02)


_TRAITS = frozenset({"matmul", "linear", "scriptable", "resizable"})

_PROBES = frozenset({"zeros", "one-hot", "powers", "channels", "midpoints", "nan[0]", "slice"})

WORKLOADS = (
    Workload("mlp", "Three linear layers with ReLU.",
        _mlp, 1, traits=_TRAITS | {"inplace", "samplewise"}, probes=_PROBES | {"ones", "inf[0]", "-inf[0]"}),
    Workload("mlp-blocks", "Three residual blocks of layer norm, linear, GELU, linear.",
        partial(of_normal, make=ResidualMlp, shape=(24, 32)), 1, traits=_TRAITS | {"blocks", "samplewise"},
        probes=_PROBES | {"huge"}),
    Workload("train-mlp", "Four steps of SGD with momentum on cross entropy.",
        _train, 1, frozenset({Mode.TRAIN}), _TRAITS | {"inplace", "training"}),
)  # fmt: skip
