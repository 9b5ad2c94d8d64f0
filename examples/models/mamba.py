"""A language model with selective scans, such as Mamba: `accelcheck check examples/models/mamba.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def selective_scan(
    x: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> torch.Tensor:
    """Returns y of h' = exp(step a) h + step b x, y = c h + d x, over the second dimension."""
    decay = torch.exp(step[..., None] * a)
    drive = step[..., None] * b[:, :, None] * x[..., None]
    h = torch.zeros_like(drive[:, 0])
    ys = []
    for t in range(x.shape[1]):
        h = decay[:, t] * h + drive[:, t]
        ys.append((h * c[:, t, None]).sum(-1))
    return torch.stack(ys, dim=1) + d * x


class MambaBlock(nn.Module):
    """Projection, causal convolution, selective scan, and a gate."""

    def __init__(self, width: int, states: int = 4, expand: int = 2, kernel: int = 4) -> None:
        super().__init__()
        inner, self.rank, self.states = expand * width, max(width // 16, 1), states
        self.norm = nn.RMSNorm(width)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.x_proj = nn.Linear(inner, self.rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        h, gate = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        h = functional.silu(self.conv1d(h.transpose(1, 2))[..., :length].transpose(1, 2))
        step, b, c = self.x_proj(h).split([self.rank, self.states, self.states], dim=-1)
        y = selective_scan(h, functional.softplus(self.dt_proj(step)), -self.A_log.exp(), b, c, self.D)
        return x + self.out_proj(y * functional.silu(gate))


class Mamba(nn.Module):
    """Embedding, blocks, and logits with the embedding's weights."""

    def __init__(self, tokens: int = 101, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(MambaBlock(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, tokens, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def make() -> dict[str, Any]:
    """Returns the model with two batches of tokens, each with the next tokens as its target."""
    texts = torch.randint(101, (2, 3, 13))
    return {
        "model": Mamba(),
        "batches": [(text[:, :-1], text[:, 1:]) for text in texts],
        "loss": lambda logits, target: functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
        "optimizer": torch.optim.AdamW,
    }
