"""Views: outputs that share the input's memory, and writes through views."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal


class Views(nn.Module):
    """Slices, transpositions and a diagonal of ``x (6, 8, 10)``, as a list; no view has an element twice."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            x[1:, ::2],
            x.transpose(0, 1),
            x.permute(2, 0, 1)[3:7],
            x.select(1, 5),
            x.narrow(2, 4, 3),
            x.diagonal(0, 1, 2),
            x[-2:].unsqueeze(0),
        ]


class ViewWrites(nn.Module):
    """A copy of ``x (6, 8)`` that is written to through its views, and two of these views, which must see all writes."""

    def forward(self, x: Tensor) -> list[Tensor]:
        base = x.clone()
        columns = base.transpose(0, 1)
        base[1:4].mul_(2.0)
        columns[2].add_(x[:, 0])
        base[:, 3:5].copy_(base[:, 5:7])
        columns[6:].neg_()
        return [base, columns, base[2:5, ::3]]


def _views(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Views(), (normal(generator, 6, 8, 10),))


def _writes(generator: torch.Generator, extent: int) -> Problem:
    return Problem(ViewWrites(), (normal(generator, 6, 8),))


WORKLOADS = (
    Workload(
        "shared-views",
        "Slices, transpositions and a diagonal of the input.",
        _views,
        2,
        frozenset({Mode.FORWARD}),  # compilers remove views from their graphs, which leaves no backward graph
        frozenset({"views", "scriptable"}),
    ),
    Workload(
        "view-writes",
        "Writes in place through rows, columns and slices of a copy.",
        _writes,
        3,
        traits=frozenset({"scriptable"}),
    ),
)
