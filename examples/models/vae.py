"""A variational autoencoder, random in its forward pass: `accelcheck check examples/models/vae.py:make`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Output(NamedTuple):
    """Logits of the pixels, mean and logarithm of the variance of the latent variables."""

    logits: torch.Tensor
    mean: torch.Tensor
    log_variance: torch.Tensor


class VAE(nn.Module):
    """Convolutional encoder and decoder with a Gaussian latent variable."""

    def __init__(self, latent: int = 8, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.mean = nn.Linear(2 * width * 4 * 4, latent)
        self.log_variance = nn.Linear(2 * width * 4 * 4, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 2 * width * 4 * 4), nn.ReLU(), nn.Unflatten(1, (2 * width, 4, 4)),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def reparameterize(self, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
        deviation = torch.exp(0.5 * log_variance)
        return mean + torch.randn_like(deviation) * deviation

    def forward(self, images: torch.Tensor) -> Output:
        h = self.encoder(images)
        mean, log_variance = self.mean(h), self.log_variance(h)
        return Output(self.decoder(self.reparameterize(mean, log_variance)), mean, log_variance)


def elbo(out: Output, images: torch.Tensor) -> torch.Tensor:
    """Returns the negative evidence lower bound for each image."""
    reconstruction = functional.binary_cross_entropy_with_logits(out.logits, images, reduction="sum")
    divergence = -0.5 * (1 + out.log_variance - out.mean**2 - out.log_variance.exp()).sum()
    return (reconstruction + divergence) / len(images)


def make() -> dict[str, Any]:
    """Returns the model with two batches of images, which are their own targets."""
    images = torch.rand(2, 4, 1, 16, 16)
    return {
        "model": VAE(),
        "batches": [(batch, batch) for batch in images],
        "loss": elbo,
        "optimizer": torch.optim.Adam,
    }
