"""Recurrent layers of one and two layers and directions, with initial states."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal

INPUTS, WIDTH, BATCH, STEPS = 5, 4, 3, 6
SHAPES = ((1, True, False), (2, False, True), (2, True, False))
"""Layers, whether both directions are run, and whether samples come first."""


class Recurrent(nn.Module):
    """Runs each kind in each of `SHAPES`: ``x (STEPS, BATCH, INPUTS)``, and states ``(4, BATCH, WIDTH)`` of all layers.

    Returns outputs and last states by the layer's name.
    """

    def __init__(self) -> None:
        super().__init__()
        kinds: Mapping[str, Callable[..., nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
        made = {
            f"{name}-{layers}{'-both' * both}": kind(INPUTS, WIDTH, layers, bidirectional=both, batch_first=first)
            for name, kind in kinds.items()
            for layers, both, first in SHAPES
        }
        self.nets = nn.ModuleDict(made)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, tuple[Tensor, ...]]:
        results = {}
        for name, module in self.nets.items():
            net = cast("nn.RNNBase", module)
            count = net.num_layers * (1 + net.bidirectional)
            state = (hidden[:count], cell[:count]) if name.startswith("lstm") else hidden[:count]
            out, last = net(x.transpose(0, 1) if net.batch_first else x, state)
            results[name] = (out, *last) if isinstance(last, tuple) else (out, last)
        return results


def _make(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Recurrent(), generator)
    states = (normal(generator, 4, BATCH, WIDTH) for _ in range(2))
    return Problem(module, (normal(generator, STEPS, BATCH, INPUTS), *states))


WORKLOADS = (
    Workload("recurrent", "LSTM, GRU and RNN of one and two layers and directions, with initial states.", _make,
        level=2, dtypes=frozenset({"float32"}), techniques=frozenset({"eager"})),
)  # fmt: skip
