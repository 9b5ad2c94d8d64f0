"""A recommender with embedding bags: `accelcheck check examples/models/recommender.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Recommender(nn.Module):
    """Dense features and bags of categories, their pairwise products, and the logit of a click."""

    def __init__(self, rows: tuple[int, ...] = (100, 50, 20), width: int = 16, dense: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        bags = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        features = torch.stack([x, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(len(bags) + 1, len(bags) + 1, offset=-1)
        return self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)


def clicks(rows: tuple[int, ...], users: int = 6) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns dense features, and for each table the categories of all users and where each user's begin."""
    indices, offsets = [], []
    for count in rows:
        lengths = torch.randint(0, 5, (users,))
        offsets.append(torch.cumsum(lengths, 0) - lengths)
        indices.append(torch.randint(count, (int(lengths.sum()),)))
    return torch.rand(users, 8), indices, offsets


def make() -> dict[str, Any]:
    """Returns the model with a batch of clicks, and others of other sizes."""
    rows = (100, 50, 20)
    batch = clicks(rows)
    sizes = [tuple(clicks(rows, users)) for users in (1, 9)]
    target = torch.randint(2, (6,)).float()
    return {
        "model": Recommender(rows),
        "sizes": sizes,
        "batches": [(batch, target)],
        "loss": nn.BCEWithLogitsLoss(),
        "optimizer": torch.optim.Adagrad,
    }
