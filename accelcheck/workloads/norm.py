"""Embedding, layer norm and GELU: reductions along the last dimension, and a transcendental function."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal


class EmbeddingNormGelu(nn.Module):
    """``gelu(norm(embedding(tokens)))``: tokens ``(B, S)`` to ``(B, S, width)``."""

    def __init__(self, vocabulary: int = 60, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.gelu(self.norm(self.embedding(tokens)))


class Gelu(nn.Module):
    """The exact GELU, which uses erf, not tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


def _embedding(generator: torch.Generator, extent: int) -> Problem:
    return Problem(initialise(EmbeddingNormGelu(), generator), (integers(generator, 0, 60, 4, 24 + extent),))


def _narrow(generator: torch.Generator, extent: int) -> Problem:
    # A variance of 1e-4 with an eps of 1e-5, over four values: a wrong eps, or N - 1 in place of N, changes the result.
    return Problem(initialise(nn.LayerNorm(4), generator), (0.01 * normal(generator, 64 + extent, 4),))


def _large(generator: torch.Generator, extent: int) -> Problem:
    # Squares exceed FP16's range.
    return Problem(initialise(nn.LayerNorm(24), generator), (1e4 * normal(generator, 16 + extent, 24),))


def _softmax(generator: torch.Generator, extent: int) -> Problem:
    # exp(200) overflows unless the maximum is subtracted first.
    return Problem(nn.Softmax(-1), (200.0 + normal(generator, 16 + extent, 24),))


def _gelu(generator: torch.Generator, extent: int) -> Problem:
    rows = 32 + extent
    grid = torch.linspace(-4.0, 4.0, rows * 64).reshape(rows, 64)
    return Problem(Gelu(), (grid + 0.001 * normal(generator, rows, 64),))


_TRAITS = frozenset({"scriptable", "resizable"})

_PROBES = frozenset({"nan[0]", "zeros", "slice"})

WORKLOADS = (
    Workload("embedding-norm-gelu", "Embedding with repeated tokens, layer norm, GELU.", _embedding, 2, traits=_TRAITS),
    Workload("layer-norm-narrow", "Layer norm over four values of low variance.",
        _narrow, 2, traits=_TRAITS, probes=_PROBES | {"huge", "inf[0]"}),
    Workload("layer-norm-large", "Layer norm of numbers of about 1e4.", _large, 3, traits=_TRAITS, probes=_PROBES),
    Workload("softmax", "Softmax of 24 scores of about 200.",
        _softmax, 3, traits=_TRAITS, probes=_PROBES | {"ones", "inf[0]", "-inf[0]"}),
    Workload("gelu", "GELU on a dense grid of [-4, 4], on which the tanh approximation differs visibly.",
        _gelu, 2, traits=_TRAITS, probes=_PROBES | {"huge"}),
    Workload("gelu-infinity", "GELU of an infinity, which must reach the output.",
        _gelu, 2, frozenset({Mode.FORWARD}), _TRAITS, probes=frozenset({"inf[0]"})),
)  # fmt: skip
