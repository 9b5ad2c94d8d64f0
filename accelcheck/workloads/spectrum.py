"""A layer on the spectrum of a signal: expressions of constants alone, and a buffer that the forward pass moves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal


class Spectrum(nn.Module):
    """A window, the first cosines (DCT-II), less the running mean of earlier batches; and a layer on that.

    Takes ``(B, n)``, gives ``(B, 5)`` and ``(B, terms)``. Window and cosines are made of constants at every call. In
    training, the mean of the batch goes into the running one. Products are added in FP32 at least, and rounded to the
    dtype of the input at the end.
    """

    def __init__(self, terms: int = 6) -> None:
        super().__init__()
        self.terms = terms
        self.weight = nn.Parameter(torch.empty(5, terms))
        self.bias = nn.Parameter(torch.empty(5))
        self.mean = nn.Buffer(torch.zeros(terms))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        size = x.size(1)
        half = (torch.arange(size, device=x.device, dtype=wide) + 0.5) * (math.pi / size)
        window = 0.5 - 0.5 * torch.cos(2 * half)
        cosines = torch.cos(torch.outer(half, torch.arange(self.terms, device=x.device, dtype=wide)))
        spectrum = (x.to(wide) * window) @ cosines * (2 / size)
        centred = (spectrum - self.mean.to(wide)).to(x.dtype)
        if self.training:
            self.mean.lerp_(spectrum.detach().mean(0).to(self.mean.dtype), 0.25)
        return functional.linear(centred, self.weight, self.bias), centred


def _spectrum(generator: torch.Generator, extent: int) -> Problem:
    del extent
    module = Spectrum()
    initialise(module, generator)
    module.mean.copy_(0.2 * normal(generator, module.terms))
    return Problem(module, (1.0 + normal(generator, 16, 24),))


WORKLOADS = (
    Workload(
        "spectrum",
        "A window and a cosine transform made of constants, a running mean, a layer.",
        _spectrum,
        2,
        traits=frozenset({"constants"}),
    ),
)
