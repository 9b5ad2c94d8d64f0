"""Mixture of experts with a capacity: a layer of its own, and trained."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal

EXPERTS, CHOSEN, CAPACITY = 4, 2, 5
"""Number of experts, how many of them a token goes to, and how many tokens of a group each of them takes."""


class Experts(nn.Module):
    """``(G, S, width)`` to the same: each token gets the sum of its two experts' results, weighted by their scores.

    An expert takes at most `CAPACITY` tokens of each of the G groups, the first ones; what others would add is dropped.
    Tokens at ``lengths (G,)`` and after are padding: no expert takes them, and their results are 0.
    """

    def __init__(self, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, width, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, hidden, width))

    def route(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Returns the weight of each expert for each token, ``(G, S, EXPERTS)``; 0 where it does not take the token."""
        scores = functional.softmax(self.router(x), -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(CHOSEN, -1).indices, value=True)
        chosen = chosen & (torch.arange(x.size(1), device=x.device) < lengths[:, None])[..., None]
        return scores * (chosen & (chosen.cumsum(1) <= CAPACITY))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        weights, out = self.route(x, lengths), torch.zeros_like(x)
        for expert in range(EXPERTS):
            out = out + weights[..., expert, None] * (functional.silu(x @ self.up[expert]) @ self.down[expert])
        return out


def _experts(generator: torch.Generator, extent: int, *, trained: bool) -> Problem:
    module = initialise(Experts(), generator)
    groups, length = 4, 12
    x = normal(generator, groups, length, 16)
    with torch.no_grad():
        # The first inputs decide, by margins that rounding does not cross: the first experts are chosen more often.
        module.router.weight.mul_(0.05)[:, :EXPERTS] += torch.eye(EXPERTS)
        for part in (module.up, module.down):
            part.copy_(normal(generator, *part.shape) / part.size(1) ** 0.5)
        liked = torch.rand(groups, length, EXPERTS, generator=generator) + 0.25 * torch.arange(EXPERTS, 0, -1)
        x[..., :EXPERTS] = 2.0 * liked.argsort(-1).argsort(-1) + 0.1 * x[..., :EXPERTS]
    inputs = x, torch.tensor([12, 10, 12, 7])
    if not trained:
        return Problem(module, inputs)
    target = normal(generator, groups, length, 16)
    return Problem(module, inputs, target, functional.mse_loss, partial(torch.optim.SGD, lr=0.01, momentum=0.9))


_TECHNIQUES = frozenset({"eager", "expert-parallel", "expert-parallel-4", "expert-parallel-grouped"})

WORKLOADS = (
    Workload("experts",
        "Four experts, of which tokens choose two: some tokens are over an expert's capacity, some are padding.",
        partial(_experts, trained=False), 1, traits=frozenset({"matmul", "linear", "domain"}), techniques=_TECHNIQUES,
        levels={"eager": 2}),
    Workload("train-experts", "Four steps of SGD with momentum on the squared error of four experts.",
        partial(_experts, trained=True), 1, frozenset({Mode.TRAIN}),
        frozenset({"matmul", "linear", "training", "domain"}), techniques=_TECHNIQUES, levels={"eager": 2}),
)  # fmt: skip
