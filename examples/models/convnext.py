"""A ConvNeXt image classifier: `accelcheck check examples/models/convnext.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of NCHW images."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise convolution, layer norm, an inverted bottleneck, and a learned scale of the residual."""

    def __init__(self, width: int, scale: float = 0.1) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, kernel_size=7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(scale * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = self.conv_dw(x).permute(0, 2, 3, 1)
        x = self.fc2(self.act(self.fc1(self.norm(x)))) * self.gamma
        return shortcut + x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Stem, stages with downsampling between them, and a head."""

    def __init__(self, depths: tuple[int, ...] = (2, 2), widths: tuple[int, ...] = (16, 32), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], kernel_size=4, stride=4), LayerNorm2d(widths[0], eps=1e-6))
        stages: list[nn.Module] = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                before = widths[stage - 1]
                stages += [LayerNorm2d(before, eps=1e-6), nn.Conv2d(before, width, kernel_size=2, stride=2)]
            stages += [Block(width) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.stem(images))
        return self.head(x.mean((-2, -1)))


def make() -> dict[str, Any]:
    """Returns the model with images and labels of two training steps."""
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(10, (4,))) for _ in range(2)]
    return {
        "model": ConvNeXt(),
        "batches": batches,
        "loss": nn.CrossEntropyLoss(label_smoothing=0.1),
        "optimizer": torch.optim.AdamW,
    }
