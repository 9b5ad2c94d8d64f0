"""Parts of large models: a layer of experts, and the loss of a vocabulary's head."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal

EXPERTS, CHOSEN, CAPACITY = 5, 2, 12
"""Number of experts, of those that each token goes to, and of the tokens that an expert takes."""


class GroupedExperts(nn.Module):
    """Two products with an expert's own matrices, one expert after the other; techniques replace `forward`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, width, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, hidden, width))

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Computes groups of rows that end at ``ends``, ``(EXPERTS,)``; rows after the last group are 0."""
        bounds = [0, *ends.tolist()]
        groups = [
            functional.silu(tokens[low:high] @ up) @ down
            for low, high, up, down in zip(bounds, bounds[1:], self.up, self.down, strict=False)
        ]
        return torch.cat([*groups, torch.zeros_like(tokens[bounds[-1] :])])


class MixtureOfExperts(nn.Module):
    """Tokens ``(N, width)`` to the same: `CHOSEN` experts each, weighted by a router; those over capacity are dropped.

    The choice, ``(N, CHOSEN)`` int64, is an input: rounding errors would turn it elsewhere.
    """

    def __init__(self, width: int = 16, hidden: int = 24, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.capacity, self.router = capacity, nn.Linear(width, EXPERTS)
        self.experts = GroupedExperts(width, hidden)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).gather(1, choice).flatten()
        expert = choice.flatten()
        one_hot = functional.one_hot(expert, EXPERTS)
        place = ((one_hot.cumsum(0) - 1) * one_hot).sum(1)
        # Dropped tokens come after all groups.
        expert = torch.where(place < self.capacity, expert, EXPERTS)
        order = expert.argsort(stable=True)
        ends = one_hot.sum(0).clamp(max=self.capacity).cumsum(0)
        kept = (expert[order] < EXPERTS).unsqueeze(1)
        rows = order // CHOSEN
        out = self.experts(torch.where(kept, x[rows], 0.0), ends)
        out = torch.where(kept, out, 0.0) * weights[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, rows, out)


class VocabularyLoss(nn.Module):
    """Cross entropy of a vocabulary's head, from hidden states ``(N, width)`` and targets ``(N,)``: 0-D."""

    def __init__(self, width: int = 32, words: int = 160) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.body(x)), target)

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Makes the logits and their loss; techniques replace it."""
        return functional.cross_entropy(self.head(hidden), target)


def _experts(
    generator: torch.Generator,
    extent: int,
    width: int = 16,
    hidden: int = 24,
    tokens: int = 24,
    capacity: int = CAPACITY,
) -> Problem:
    module = initialise(MixtureOfExperts(width, hidden, capacity), generator)
    with torch.no_grad():
        # A variance of 1 / fan_in of one expert's matrix: `initialise` counts both of its dimensions.
        module.experts.up.mul_(hidden**0.5)
        module.experts.down.mul_(width**0.5)
    count = tokens + extent
    # The first expert gets too many tokens, and the last one none.
    first = integers(generator, 0, EXPERTS - 1, count) * (torch.arange(count) % 2)
    second = (first + 1 + integers(generator, 0, EXPERTS - 2, count)) % (EXPERTS - 1)
    return Problem(module, (normal(generator, count, width), torch.stack([first, second], 1)))


def _vocabulary(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(VocabularyLoss(), generator)
    target = integers(generator, 0, 160, 40 + extent)
    target[3] = -100  # cross entropy's own number for no target
    return Problem(module, (normal(generator, 40 + extent, 32), target))


def _training(generator: torch.Generator, extent: int) -> Problem:
    # Decay rates are exact in FP32, in which some optimizers compute 1 - rate**step.
    optimizer = partial(torch.optim.AdamW, lr=1e-2, betas=(0.875, 0.96875), eps=1e-3, weight_decay=0.1)
    return replace(_vocabulary(generator, extent), target=torch.zeros(1), loss=_itself, optimizer=optimizer)


def _itself(loss: Tensor, _: Tensor) -> Tensor:
    return loss


LOSSES = frozenset(
    """eager linear-cross-entropy liger-cross-entropy liger-linear-cross-entropy cut-cross-entropy
    cut-cross-entropy-compiled""".split()
)

WORKLOADS = (
    Workload("grouped-experts",
        "A layer of five experts with a router: dropped tokens, one expert over capacity, one without any token.",
        _experts, 2, traits=frozenset({"matmul", "linear", "resizable"}), dtypes=frozenset({"float32", "bfloat16"}),
        techniques=frozenset({"eager", "moe-grouped-mm", "moe-grouped-mm-padded"})),
    Workload("speed-experts", "A layer of five experts on 512 tokens, from width 128 to 256 and back: 0.1 GFLOP.",
        partial(_experts, width=128, hidden=256, tokens=512, capacity=288), 3, frozenset({Mode.SPEED}),
        frozenset({"matmul", "linear"}), techniques=frozenset({"eager", "moe-grouped-mm", "moe-grouped-mm-padded"})),
    Workload("vocabulary-loss", "A head of 160 words and its cross entropy, one target ignored.",
        _vocabulary, 2, traits=frozenset({"matmul", "linear", "resizable"}), dtypes=frozenset({"float32", "bfloat16"}),
        techniques=LOSSES),
    Workload("train-vocabulary", "Four steps of AdamW on a head of 160 words.",
        _training, 2, frozenset({Mode.TRAIN}), frozenset({"matmul", "linear", "resizable", "training"}),
        frozenset({"float32"}), levels=dict.fromkeys(LOSSES - {"eager"}, 3),
        techniques=LOSSES | {"adamw-8bit-torchao", "adamw-8bit-bitsandbytes"}),
)  # fmt: skip
