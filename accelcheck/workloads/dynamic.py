"""Networks whose depth depends on their input, drawn so that rounding errors cannot change a decision."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal
from accelcheck.workloads.probes import SCALES

WIDTH = 32
MARGIN = 24 * 2.0**-8
"""Smallest distance of a deciding number from its threshold: 24 times bfloat16's unit roundoff u.

A halting probability is a sigmoid (slope 1/4 at most) of a state of magnitude 1 to 2. Up to ten residual blocks have
each rounded this state three times, which gives an error of about sqrt(30) u, and so 2 to 3 u in the probability.
Summing up to five probabilities adds one u each. Measured over 600 networks, in bfloat16 and under autocast: 4 u at
most. The rest of the margin is for training, whose steps move the number by up to 32 u, mostly away from the threshold;
at least 14 u are left.
"""
PONDERING = 0.05
"""Weight of the mean number of steps in the loss."""


class DynamicDepth(nn.Module):
    """Applies a shared layer ``1 + n % 4`` times, where n samples have a positive first feature.

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
    """Adaptive computation time (A. Graves, arXiv:1603.08983): each sample takes its own number of steps.

    A step applies the two `blocks` to the state and computes a halting probability for each sample. A sample stops
    after step N, the first at which the sum of its probabilities reaches `limit`. The weight of each step is its
    probability; that of step N is the remainder R, so that weights sum to 1. The loop ends when all have stopped.

    Takes ``(B, width)``. Returns the weighted mean state's head, ``(B, classes)``, and the ponder cost ``N + R``,
    ``(B,)``.
    """

    LIMIT = 0.99
    STEPS = 6
    """Largest number of steps; inputs are drawn so that no sample reaches it."""

    def __init__(self, width: int = WIDTH, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)  # the input of a reentrant checkpoint must require a gradient
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
    """Four residual `blocks`, each run for the whole batch if the mean score of its linear gate is positive.

    The sigmoid of each sample's own score weights a block, so that gates get gradients (as in A. Veit and S. Belongie,
    arXiv:1711.11503). A skipped block gets no gradient. Takes ``(B, width)``, returns ``(B, classes)``.
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
    """Marks samples, ``(B,)`` bool, that stop at the same early step with the limit lowered or raised by `MARGIN`."""
    double = copy.deepcopy(module).double()
    costs: list[Tensor] = []
    for double.limit in (module.limit - MARGIN, module.limit + MARGIN):
        costs.append(double(x.double())[1])
    return (costs[0] == costs[1]) & (costs[1] < module.steps)


@torch.no_grad()
def votes_alike(module: GatedDepth, runs: Tensor, x: Tensor) -> Tensor:
    """Marks samples, ``(B,)`` bool, scoring at least ``2 * MARGIN`` for each block that `runs`, ``(depth,)`` bool.

    For the other blocks, the score must be at most ``-2 * MARGIN``. The margin is doubled because no sigmoid reduces
    errors of these scores, and training moves them as far.
    """
    scores = copy.deepcopy(module.gates).double()(x.double())
    clear: Tensor = torch.where(runs, scores >= 2 * MARGIN, scores <= -2 * MARGIN).all(1)
    return clear


def at_all_scales(alike: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Marks samples, ``(B,)`` bool, that pass `alike` at each of `SCALES`, the factors of the random draws."""
    return torch.stack([alike(scale * x) for scale in SCALES]).all(0)


def _decided(draw: Callable[[int], Tensor], alike: Callable[[Tensor], Tensor], batch: int) -> Tensor:
    """Draws samples until `batch` of them pass `alike` at all scales."""
    kept = draw(0)
    while len(kept) < batch:
        x = draw(2 * batch)
        kept = torch.cat([kept, x[at_all_scales(alike, x)]])
    return kept[:batch]


def _depth(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(DynamicDepth(), generator)
    batch = 10 + extent
    x = normal(generator, batch, WIDTH)
    # Magnitudes of 1 or more: rounding cannot change a sign.
    gates = (2 * integers(generator, 0, 2, batch) - 1) * (1.0 + x[:, 0].abs())
    return Problem(module, (torch.cat([gates.unsqueeze(-1), x[:, 1:]], dim=1),))


def _time(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(AdaptiveTime(), generator)
    with torch.no_grad():
        module.halt.bias.sub_(0.5)  # probabilities around 0.4: two to five steps
    x = _decided(lambda count: normal(generator, count, WIDTH), partial(halts_alike, module), 10 + extent)
    return Problem(module, (x,))


def _gated(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(GatedDepth(), generator)
    depth = len(module.blocks)
    while True:
        # A context shared by all samples decides, so that the same blocks run for any part of the batch.
        context = normal(generator, 1, WIDTH)
        runs = module.gates(context)[0] > 0
        alike = partial(votes_alike, module, runs)
        if 0 < int(runs.sum()) < depth and bool(at_all_scales(alike, context).all()):
            break
    x = _decided(lambda count: context + 0.3 * normal(generator, count, WIDTH), alike, 10 + extent)
    return Problem(module, (x,))


def pondered(out: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of the logits, plus `PONDERING` times the mean ponder cost."""
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
    target = integers(generator, 0, 10, len(problem.inputs[0]))
    return replace(problem, target=target, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.001, momentum=0.9))


_TRAITS = frozenset({"branching", "linear", "matmul", "resizable", "scriptable"})
_TRAINING = _TRAITS | {"blocks", "training"}
_SINGLE = frozenset({"float32"})  # half precision loses such small steps

WORKLOADS = (
    Workload("dynamic-depth",
        "A layer applied one to four times: a Python loop whose length is computed from the input.",
        _depth, 2, traits=_TRAITS),
    Workload("adaptive-time",
        "Adaptive computation time: two blocks, applied until every sample has halted, and the ponder cost.",
        _time, 2, traits=_TRAITS | {"blocks"}),
    # Shut gates leave these without a gradient.
    Workload("gated-depth", "Four residual blocks, some of which are skipped for the whole batch.",
        _gated, 2, traits=_TRAITS | {"blocks"},
        idle=frozenset(f"blocks.{i}.fc.{name}" for i in range(4) for name in ("weight", "bias"))),
    Workload("train-adaptive-time", "Four steps of SGD with momentum on cross entropy and ponder cost.",
        partial(_trained, make=_time, loss=pondered), 2, frozenset({Mode.TRAIN}), _TRAINING, _SINGLE),
    Workload("train-gated-depth", "Four steps of SGD with momentum, in which some blocks get no gradient.",
        partial(_trained, make=_gated, loss=functional.cross_entropy), 2, frozenset({Mode.TRAIN}), _TRAINING, _SINGLE),
)  # fmt: skip
