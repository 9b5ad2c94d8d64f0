"""A transformer block with a mixture of experts: `accelcheck check examples/models/experts.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    """Sends each token to its two best experts, and adds their outputs by the router's weights."""

    def __init__(self, width: int, count: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == number)
            if len(row):
                share = expert(tokens[row]) * weights[row, rank, None]
                out.index_add_(0, row, share.to(out.dtype))
        return out.view_as(x)


class Block(nn.Module):
    """Causal attention, then experts."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.experts = Experts(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    """Embedding, blocks, and a linear head."""

    def __init__(self, tokens: int = 97, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> dict[str, Any]:
    """Returns the model with two batches of tokens and their next tokens."""
    texts = torch.randint(97, (2, 4, 13))
    return {
        "model": Model(),
        "batches": [(text[:, :-1], text[:, 1:]) for text in texts],
        "loss": lambda logits, target: functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
        "optimizer": torch.optim.AdamW,
    }
