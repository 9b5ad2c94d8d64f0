"""A graph network that adds messages of edges: `accelcheck check examples/models/graph.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Graph attention: each node adds its neighbours' messages, weighted by a softmax over its edges."""

    def __init__(self, before: int, after: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.width = heads, after // heads
        self.project = nn.Linear(before, after, bias=False)
        self.source = nn.Parameter(torch.randn(heads, self.width) * 0.3)
        self.target = nn.Parameter(torch.randn(heads, self.width) * 0.3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        h = self.project(x).view(-1, self.heads, self.width)
        score = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        score = functional.leaky_relu(score, 0.2)
        at = target[:, None].expand_as(score)
        largest = torch.full((len(x), self.heads), float("-inf"), device=x.device, dtype=score.dtype)
        largest = largest.scatter_reduce(0, at, score.detach(), "amax")
        weight = (score - largest[target]).exp()
        total = torch.zeros(len(x), self.heads, device=x.device, dtype=weight.dtype).scatter_add(0, at, weight)
        weight = weight / (total[target] + 1e-16)
        messages = h[source] * weight[..., None]
        return torch.zeros_like(h).index_add(0, target, messages).flatten(1)


class GraphNet(nn.Module):
    """Two layers of attention, the mean of each graph's nodes, and a linear head."""

    def __init__(self, features: int = 8, width: int = 16, classes: int = 3) -> None:
        super().__init__()
        self.first = Attention(features, width)
        self.second = Attention(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = functional.elu(self.first(x, edges))
        x = functional.elu(self.second(x, edges))
        count = int(graph.max()) + 1
        total = x.new_zeros(count, x.shape[1]).index_add_(0, graph, x)
        size = torch.bincount(graph, minlength=count).clamp(min=1)
        return self.head(total / size[:, None])


def graphs(nodes: int, edges: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns features, edges with a loop at each node, and the number of each node's graph."""
    loops = torch.arange(nodes).expand(2, -1)
    number = torch.arange(nodes) * count // nodes
    return torch.randn(nodes, 8), torch.cat([torch.randint(nodes, (2, edges)), loops], dim=1), number


def make() -> dict[str, Any]:
    """Returns the model with a batch of four graphs, and others of other sizes."""
    inputs = graphs(30, 90, 4)
    return {
        "model": GraphNet(),
        "sizes": [graphs(31, 75, 4), graphs(12, 20, 1)],
        "batches": [(inputs, torch.tensor([0, 2, 1, 1]))],
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam,
    }
