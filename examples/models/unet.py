"""A UNet that segments images: `accelcheck check examples/models/unet.py:make`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class DoubleConv(nn.Sequential):
    """Two convolutions with batch norm."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Encoder and decoder with a connection at each resolution."""

    def __init__(self, channels: int = 3, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.inc = DoubleConv(channels, widths[0])
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(widths[0], widths[1]))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(widths[1], widths[2]))
        self.up1 = nn.ConvTranspose2d(widths[2], widths[1], kernel_size=2, stride=2)
        self.conv1 = DoubleConv(widths[2], widths[1])
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2 = DoubleConv(widths[1] + widths[0], widths[0])
        self.out = nn.Conv2d(widths[0], classes, kernel_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inc(x)
        second = self.down1(first)
        third = self.down2(second)
        y = self.conv1(torch.cat([second, self.up1(third)], dim=1))
        y = self.up2(y)
        rows, columns = first.shape[2] - y.shape[2], first.shape[3] - y.shape[3]
        y = functional.pad(y, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.out(self.conv2(torch.cat([first, y], dim=1)))


def dice_and_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy plus the loss of Dice."""
    shares = logits.softmax(1)
    hot = functional.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).to(shares.dtype)
    both = (shares * hot).sum((0, 2, 3))
    dice = (2 * both + 1) / (shares.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + 1)
    return functional.cross_entropy(logits, target) + 1 - dice.mean()


def make() -> dict[str, Any]:
    """Returns the model in training mode with two batches of images and masks."""
    batches = [(torch.rand(2, 3, 32, 32), torch.randint(4, (2, 32, 32))) for _ in range(2)]
    return {
        "model": UNet().train(),
        "batches": batches,
        "loss": dice_and_cross_entropy,
        "optimizer": functools.partial(torch.optim.RMSprop, lr=1e-4, momentum=0.9),
    }
