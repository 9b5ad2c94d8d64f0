"""Pre-norm transformer encoders: one block, several blocks, and the training of a small language model."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.attention import MultiHeadAttention
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, of_normal

VOCABULARY = 50


class EncoderBlock(nn.Module):
    """``x + attention(norm1(x))``, then ``x + fc2(gelu(fc1(norm2(x))))``; ``(B, S, width)`` to the same."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = MultiHeadAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return out


class Encoder(nn.Module):
    """Three `EncoderBlock` in `blocks` and a last norm; ``(B, S, width)`` to the same."""

    def __init__(self, width: int = 32, heads: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([EncoderBlock(width, heads, 2 * width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class Tagger(nn.Module):
    """Token and position embeddings, two `EncoderBlock` in `blocks`, norm and head: logits ``(B, vocabulary, S)``."""

    def __init__(self, width: int = 32, heads: int = 2, longest: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(longest, width))
        self.blocks = nn.ModuleList([EncoderBlock(width, heads, 2 * width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)).transpose(1, 2)  # cross_entropy expects classes in the second dimension
        return out


def _train(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Tagger(), generator)
    tokens, target = (integers(generator, 0, VOCABULARY, 4, 16 + extent) for _ in range(2))
    # AdamW's first step is lr * g / (|g| + eps): with the usual eps of 1e-8, the rounding error of a gradient near 0
    # would decide the sign of the step, and move the parameter by a whole lr.
    optimizer = partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)
    return Problem(module, (tokens,), target, functional.cross_entropy, optimizer)


_TRAITS = frozenset({"attention", "matmul", "linear", "scriptable", "resizable"})

WORKLOADS = (
    Workload("transformer-block", "One pre-norm encoder block: attention, layer norm, GELU.",
        partial(of_normal, make=partial(EncoderBlock, 64, 4, 128), shape=(2, 24, 64), axis=1), 2, traits=_TRAITS,
        probes=frozenset({"slice"})),
    Workload("transformer-blocks", "Three encoder blocks and a norm.",
        partial(of_normal, make=Encoder, shape=(2, 20, 32), axis=1), 2, traits=_TRAITS | {"blocks"}),
    # With FP16 parameters, AdamW's second moments are subnormal: eager itself differs from the oracle by 5 %.
    Workload("train-transformer", "Four steps of AdamW on the cross entropy of tokens.",
        _train, 2, frozenset({Mode.TRAIN}), _TRAITS | {"blocks", "training"}, frozenset({"float32", "bfloat16"})),
)  # fmt: skip
