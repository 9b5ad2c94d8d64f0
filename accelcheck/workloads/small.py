"""Results with parts of different magnitudes: channels of small scale, and probabilities with a long tail."""

import torch
from torch import Tensor, nn

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal, orders


class ScaledChannels(nn.Module):
    """``tanh(x) * scale``, with scales from 1 to 1/512: ``(batch, channels)`` to the same.

    Args:
        order: A permutation of the channels, which decides their scales.
    """

    def __init__(self, order: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(2.0 ** -(order % 10.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


def _channels(generator: torch.Generator, extent: int) -> Problem:
    return Problem(ScaledChannels(orders(generator, 40)), (normal(generator, 48 + extent, 40),))


def _peaked(generator: torch.Generator, extent: int) -> Problem:
    # Logits of deviation 2: the largest of 512 probabilities is thousands of times the median one.
    return Problem(nn.Softmax(-1), (2.0 * normal(generator, 12 + extent, 512),))


_TRAITS = frozenset({"scriptable", "resizable", "samplewise"})

WORKLOADS = (
    Workload("scaled-channels", "An elementwise product whose channels have scales from 1 to 1/512.",
        _channels, 2, traits=_TRAITS),
    Workload("softmax-peaked", "Softmax over 512 logits, most of whose probabilities are small.",
        _peaked, 2, traits=_TRAITS),
)  # fmt: skip
