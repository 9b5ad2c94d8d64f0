"""A layer on the spectrum of a signal: expressions of constants alone, and a buffer that the forward pass updates."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal


class Spectrum(nn.Module):
    """A window, the first cosine terms (DCT-II) minus a running mean over batches, and a linear layer on these.

    Takes ``(B, n)``, returns the layer's output ``(B, 5)`` and the terms ``(B, terms)``. Window and cosines are
    computed from constants in every call. In training, the mean of the batch updates the running mean. Sums are
    accumulated in FP32 or wider, and rounded to the dtype of the input at the end.
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
    module = initialise(Spectrum(), generator)
    module.mean.copy_(0.2 * normal(generator, module.terms))
    return Problem(module, (1.0 + normal(generator, 16, 24),))


WORKLOADS = (
    Workload("spectrum", "A window and a cosine transform computed from constants, a running mean, a linear layer.",
        _spectrum, 2, traits=frozenset({"constants"})),
)  # fmt: skip
