"""Combinations of mode and gradients left out by other modes: gradients in evaluation, training mode without any."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal


class _Normed(nn.Module):
    """Linear, batch norm, tanh: ``(batch, features)`` to ``(batch, hidden)``."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, hidden)
        self.bn = nn.BatchNorm1d(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bn(self.fc(x)))


class Saliency(nn.Module):
    """Classifier that stays in evaluation mode even for gradients, as for saliency maps and adversarial examples."""

    def __init__(self, features: int = 24, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.body = _Normed(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def train(self, mode: bool = True) -> Saliency:  # noqa: FBT001, FBT002 - the signature of nn.Module.train
        return super().train(mode=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class FrozenBackbone(nn.Module):
    """Head on a frozen backbone without gradients, whose batch norm stays in training mode and follows new data."""

    def __init__(self, features: int = 24, hidden: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.backbone = _Normed(features, hidden).requires_grad_(requires_grad=False)
        self.head = nn.Linear(hidden, classes)

    def train(self, mode: bool = True) -> FrozenBackbone:  # noqa: FBT001, FBT002 - the signature of nn.Module.train
        super().train(mode)
        self.backbone.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        out: Tensor = self.head(features)
        return out


def _moved(generator: torch.Generator, extent: int, *, make: type[nn.Module]) -> Problem:
    """Draws parameters, and running statistics that no batch has: a wrong choice of them changes every result."""
    module = initialise(make(), generator)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.get_buffer("running_mean").copy_(0.5 * normal(generator, layer.num_features))
            layer.get_buffer("running_var").copy_(0.5 + torch.rand(layer.num_features, generator=generator))
    return Problem(module, (normal(generator, 20 + extent, 24),))


_TRAITS = frozenset({"matmul", "linear", "resizable", "scriptable"})

WORKLOADS = (
    Workload("saliency", "Linear layers and batch norm that stay in evaluation mode, with gradients of the input.",
        partial(_moved, make=Saliency), 1, traits=_TRAITS | {"samplewise"}, probes=frozenset({"zeros", "powers"})),
    Workload("frozen-backbone", "A head on frozen layers whose batch norm stays in training mode, without gradients.",
        partial(_moved, make=FrozenBackbone), 1, traits=_TRAITS, idle=frozenset({"input[0]"})),
)  # fmt: skip
