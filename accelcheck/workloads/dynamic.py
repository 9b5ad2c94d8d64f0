"""Networks whose depth depends on their input, and the margins that keep rounding from deciding it."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal
from accelcheck.workloads.probes import SCALES

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 32
MARGIN = 24 * 2.0**-8
"""Least distance of every decision's number from its threshold: 24 times bfloat16's unit roundoff u.

A halting probability is the sigmoid, of slope 1/4 at most, of a sum over a state of size 1 to 2 that up to ten residual blocks
have each rounded three times: sqrt(30) u by chance, which leaves 2 to 3 u; the sum of up to five of them adds u each. Over 600
networks it errs by 4 u at most, in bfloat16 and under autocast. The rest is for training, whose steps move it by up to 32 u
and away from where a decision would change: 14 u are left at least.
"""
PONDERING = 0.05
"""Price of a step, relative to the loss of the task."""


class DynamicDepth(nn.Module):
    """A shared layer, applied once and once more for every sample (modulo 4) whose first feature is positive.

    Takes and returns ``(B, width)``.
    """

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.cell = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        depth = 1 + int((x[:, 0] > 0).sum()) % 4
        for _ in range(depth):
            x = torch.tanh(self.cell(x)) + 0.5 * x
        out: Tensor = self.head(x)
        return out


class RecurrentCell(nn.Module):
    """``tanh(fc(x)) + x / 2``; ``(..., width)`` to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.fc(x)) + 0.5 * x
        return out


class AdaptiveTime(nn.Module):
    """Adaptive computation time (A. Graves, arXiv:1603.08983): each sample takes as many steps as it asks for.

    A step applies the two `blocks` to the state. After each, a sample halts with some probability; it stops after step N, the
    first at which the sum of its probabilities reaches `limit`, and what is left of 1 is the remainder R, its weight of step
    N. The batch goes on until all have stopped. Takes ``(B, width)``; returns the head of the weighted mean state, ``(B,
    classes)``, and what the steps cost, ``N + R``, ``(B,)``.
    """

    LIMIT = 0.99
    STEPS = 6
    """Most of them; inputs are drawn so that none needs it."""

    def __init__(self, width: int = WIDTH, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)  # a reentrant checkpoint needs an input that requires a gradient
        self.blocks = nn.ModuleList([RecurrentCell(width), RecurrentCell(width)])
        self.halt = nn.Linear(width, 1)
        self.head = nn.Linear(width, classes)
        self.limit = self.LIMIT
        self.steps = self.STEPS

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        mean = torch.zeros_like(x)
        spent = torch.zeros_like(x[:, 0])
        ponder = torch.zeros_like(spent)
        for _ in range(self.steps):
            running = spent < self.limit
            if not bool(running.any()):
                break
            for block in self.blocks:
                x = block(x)
            chance = torch.sigmoid(self.halt(x)).squeeze(1)
            last = spent + chance >= self.limit
            weight = torch.where(last, 1.0 - spent, chance)
            mean = torch.where(running.unsqueeze(1), mean + weight.unsqueeze(1) * x, mean)
            ponder = ponder + torch.where(running, torch.where(last, 2.0 - spent, 1.0), 0.0)
            spent = torch.where(running, spent + chance, spent)
        return self.head(mean), ponder


class GatedDepth(nn.Module):
    """Four residual `blocks`, each run for the batch or skipped, as its mean score by a linear gate is positive or not.

    A block that runs is weighted by the sigmoid of each sample's own score, so that gates learn (as in A. Veit and S.
    Belongie, arXiv:1711.11503); one that is skipped gets no gradient. Takes ``(B, width)``, returns ``(B, classes)``.
    """

    def __init__(self, width: int = WIDTH, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.gates = nn.Linear(width, depth)
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([RecurrentCell(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gates(x)
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if bool(scores[:, index].mean() > 0):
                x = x + torch.sigmoid(scores[:, index : index + 1]) * block(x)
        out: Tensor = self.head(x)
        return out


@torch.no_grad()
def halts_alike(module: AdaptiveTime, x: Tensor) -> Tensor:
    """Which samples, ``(B,)`` bool, stop at the same step, before the last one, with the limit a margin off either way."""
    double = copy.deepcopy(module).double()
    found: list[Tensor] = []
    for double.limit in (module.limit - MARGIN, module.limit + MARGIN):
        found.append(double(x.double())[1])
    return (found[0] == found[1]) & (found[1] < module.steps)


@torch.no_grad()
def votes_alike(module: GatedDepth, runs: Tensor, x: Tensor) -> Tensor:
    """Which samples, ``(B,)`` bool, have scores two margins off 0 on the side that `runs` (depth,) says of each block.

    Two, since no sigmoid makes them smaller, and training moves them as far.
    """
    scores = copy.deepcopy(module.gates).double()(x.double())
    clear: Tensor = torch.where(runs, scores >= 2 * MARGIN, scores <= -2 * MARGIN).all(1)
    return clear


def at_all_scales(alike: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Which samples, ``(B,)`` bool, are decided alike at every scale that inputs are given."""
    return torch.stack([alike(scale * x) for scale in SCALES]).all(0)


def _decided(draw: Callable[[int], Tensor], alike: Callable[[Tensor], Tensor], batch: int) -> Tensor:
    """The first `batch` samples whose decisions have a margin."""
    kept = draw(0)
    while len(kept) < batch:
        x = draw(2 * batch)
        kept = torch.cat([kept, x[at_all_scales(alike, x)]])
    return kept[:batch]


def _depth(generator: torch.Generator, extent: int) -> Problem:
    module = DynamicDepth()
    initialise(module, generator)
    batch = 10 + extent
    x = normal(generator, batch, WIDTH)
    # The gates are +-1 or more in size: no rounding of the input moves one across 0.
    gates = (2 * integers(generator, 0, 2, batch) - 1) * (1.0 + x[:, 0].abs())
    return Problem(module, (torch.cat([gates.unsqueeze(-1), x[:, 1:]], dim=1),))


def _time(generator: torch.Generator, extent: int) -> Problem:
    module = AdaptiveTime()
    initialise(module, generator)
    with torch.no_grad():
        module.halt.bias.sub_(0.5)  # probabilities around 0.4: two to five steps
    x = _decided(lambda count: normal(generator, count, WIDTH), partial(halts_alike, module), 10 + extent)
    return Problem(module, (x,))


def _gated(generator: torch.Generator, extent: int) -> Problem:
    module = GatedDepth()
    initialise(module, generator)
    depth = len(module.blocks)
    while True:
        # What all samples have in common decides: some blocks run and some do not, for any part of the batch.
        context = normal(generator, 1, WIDTH)
        runs = module.gates(context)[0] > 0
        alike = partial(votes_alike, module, runs)
        if 0 < int(runs.sum()) < depth and bool(at_all_scales(alike, context).all()):
            break
    x = _decided(lambda count: context + 0.3 * normal(generator, count, WIDTH), alike, 10 + extent)
    return Problem(module, (x,))


def pondered(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of the logits, and the mean price of the steps."""
    logits, ponder = out
    return functional.cross_entropy(logits, target) + PONDERING * ponder.mean()


def _trained(
    generator: torch.Generator,
    extent: int,
    *,
    make: Callable[[torch.Generator, int], Problem],
    loss: Callable[..., Tensor],
) -> Problem:
    problem = make(generator, extent)
    return replace(
        problem,
        target=integers(generator, 0, 10, len(problem.inputs[0])),
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.001, momentum=0.9),
        steps=4,
    )


_TRAITS = frozenset({"branching", "linear", "matmul", "resizable", "scriptable"})
_TRAINING = _TRAITS | {"blocks", "training"}
_SINGLE = frozenset({"float32"})  # in half precision steps so small are lost

WORKLOADS = (
    Workload(
        "dynamic-depth",
        "A layer applied one to four times: a Python loop whose length is computed from the input.",
        _depth,
        2,
        traits=_TRAITS,
    ),
    Workload(
        "adaptive-time",
        "Adaptive computation time: two blocks applied until every sample has halted, and what that costs.",
        _time,
        2,
        traits=_TRAITS | {"blocks"},
    ),
    Workload(
        "gated-depth",
        "Four residual blocks, some of which the batch skips.",
        _gated,
        2,
        traits=_TRAITS | {"blocks"},
    ),
    Workload(
        "train-adaptive-time",
        "Four steps of SGD with momentum on cross entropy and the price of pondering.",
        partial(_trained, make=_time, loss=pondered),
        2,
        frozenset({Mode.TRAIN}),
        _TRAINING,
        _SINGLE,
    ),
    Workload(
        "train-gated-depth",
        "Four steps of SGD with momentum, in which some blocks get no gradient.",
        partial(_trained, make=_gated, loss=functional.cross_entropy),
        2,
        frozenset({Mode.TRAIN}),
        _TRAINING,
        _SINGLE,
    ),
)
