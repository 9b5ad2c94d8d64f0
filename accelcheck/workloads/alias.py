"""Shared memory: views of a value or of the input as outputs, writes through views, and a layer under two names."""

from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal, of_normal


class DetachedBeside(nn.Module):
    """Both halves of ``sin(x * weight)``, with gradients, and the whole value, detached.

    Models return a loss and its detached value for logging like this. The detached output must not remove the gradients
    of outputs that share its memory.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.sin(x * self.weight)
        half = y.size(0) // 2
        return y[:half], y[half:], y.detach()


class ScaleShift(nn.Module):
    """``x * weight + bias``, both (width,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Shared(nn.Module):
    """One `ScaleShift` before and after a sine, registered under two names: the gradients of both uses are summed."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before = ScaleShift(width)
        self.after = self.before

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(torch.sin(self.before(x)))
        return out


_TRAITS = frozenset({"scriptable", "resizable"})


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
    """Writes to a copy of ``x (6, 8)`` through its views, two of which are returned and must see all writes."""

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
    Workload("detached-beside", "Views of a value as outputs, together with the detached value.",
        partial(of_normal, make=DetachedBeside, shape=(24, 32)), 2, traits=_TRAITS),
    Workload("shared-layer", "A layer that is registered under two names and called twice.",
        partial(of_normal, make=Shared, shape=(24, 32)), 2, traits=_TRAITS),
    # Compilers remove views from their graphs, which leaves no backward graph.
    Workload("shared-views", "Slices, transpositions and a diagonal of the input.",
        _views, 2, frozenset({Mode.FORWARD}), frozenset({"views", "scriptable"})),
    Workload("view-writes", "Writes in place through rows, columns and slices of a copy.",
        _writes, 3, traits=frozenset({"scriptable"})),
)  # fmt: skip
