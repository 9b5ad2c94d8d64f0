"""A Fourier neural operator with complex weights: `accelcheck check examples/models/fourier.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class SpectralConv(nn.Module):
    """Multiplies the lowest frequencies of both axes by complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / width
        self.low = nn.Parameter(scale * torch.randn(width, width, modes, modes, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.randn(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FourierOperator(nn.Module):
    """Lifts fields, applies spectral and pointwise layers, and projects to the solution."""

    def __init__(self, modes: int = 4, width: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(layers))
        self.pointwise = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(nn.Conv2d(width, 32, 1), nn.GELU(), nn.Conv2d(32, 1, 1))

    def forward(self, field: torch.Tensor) -> torch.Tensor:
        rows, columns = field.shape[-2:]
        y = torch.linspace(0, 1, rows, device=field.device, dtype=field.dtype)
        x = torch.linspace(0, 1, columns, device=field.device, dtype=field.dtype)
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij")).expand(len(field), -1, -1, -1)
        h = self.lift(torch.cat([field, grid], dim=1))
        for spectral, pointwise in zip(self.spectral, self.pointwise, strict=True):
            h = functional.gelu(spectral(h) + pointwise(h))
        return self.project(h)


def relative_l2(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the mean over samples of the relative L2 error."""
    return ((out - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)).mean()


def make() -> dict[str, Any]:
    """Returns the model with two batches of fields and solutions."""
    batches = [(torch.randn(3, 1, 16, 16), torch.randn(3, 1, 16, 16)) for _ in range(2)]
    return {"model": FourierOperator(), "batches": batches, "loss": relative_l2, "optimizer": torch.optim.Adam}
