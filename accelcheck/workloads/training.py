"""Long trainings: shuffled mini-batches, accumulated and clipped gradients, a schedule, dropped inputs."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal
from accelcheck.workloads.trainer import Inputs, Recipe
from accelcheck.workloads.transformer import VOCABULARY, Tagger

STEPS = 50
BATCHES = 8
CLASSES = 10
DROPPED = 0.25
"""Probability of dropping an input, drawn on the CPU, unlike `torch.nn.Dropout`, so that all devices drop the same."""


class Perceptron(nn.Module):
    """A linear layer, then two blocks of SiLU and linear: ``(N, features)`` to ``(N, CLASSES)``.

    Smooth, so that rounding errors switch no unit on or off. The first layer is no block, since a reentrant checkpoint
    needs an input with a gradient.
    """

    def __init__(self, features: int = 24, hidden: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(features, hidden)
        self.blocks = nn.ModuleList([nn.Sequential(nn.SiLU(), nn.Linear(hidden, out)) for out in (hidden, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def drop(inputs: Inputs) -> Inputs:
    """Drops elements of floating-point inputs, and scales the others up."""
    return tuple(_dropped(value) for value in inputs)


def _dropped(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    kept = torch.rand(value.shape) >= DROPPED
    return value * kept.to(value.device) / (1.0 - DROPPED)


def _mlp(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Perceptron(), generator)
    rows, features = BATCHES * (16 + extent), 24
    x = normal(generator, rows, features)
    # Classes depend mostly on the sample, so that there is something to learn.
    target = (x @ normal(generator, features, CLASSES) + normal(generator, rows, CLASSES)).argmax(1)
    optimizer = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-2)
    # Gradients have norms of 0.3 to 2: some are clipped, some are not.
    recipe = Recipe(BATCHES, partial(CosineAnnealingLR, T_max=STEPS), clip=0.9, accumulation=2, augment=drop)
    return Problem(module, (x,), target, functional.cross_entropy, optimizer, STEPS, recipe)


def _transformer(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Tagger(width=16), generator)
    shape = (BATCHES * 4, 12 + extent)
    tokens = integers(generator, 0, VOCABULARY, *shape)
    # A large eps, as in train-transformer: else the rounding error of a gradient near 0 decides the sign of a step.
    optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, weight_decay=0.1)
    recipe = Recipe(BATCHES, partial(CosineAnnealingLR, T_max=STEPS), clip=1.0)
    return Problem(module, (tokens,), tokens.roll(1, 1) // 5, functional.cross_entropy, optimizer, STEPS, recipe)


_TRAITS = frozenset({"matmul", "linear", "scriptable", "resizable", "blocks", "training"})

WORKLOADS = (
    # In half precision, updates smaller than a parameter's spacing are lost: eager itself diverges from the oracle.
    Workload("trajectory-mlp",
        "Fifty steps of SGD with momentum and decay: accumulation, clipping, a schedule, dropped inputs.",
        _mlp, 1, frozenset({Mode.TRAJECTORY}), _TRAITS | {"inplace"}, frozenset({"float32"})),
    Workload("trajectory-transformer",
        "Fifty steps of AdamW on tokens that attention must find: clipping and a schedule.",
        _transformer, 2, frozenset({Mode.TRAJECTORY}), _TRAITS | {"attention"}, frozenset({"float32"})),
)  # fmt: skip
