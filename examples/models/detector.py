"""A detector with non-maximum suppression: `accelcheck check examples/models/detector.py:make`."""

from __future__ import annotations

import torch
from torch import nn


def iou(boxes: torch.Tensor) -> torch.Tensor:
    """Returns the intersection over union of all pairs of boxes (x1, y1, x2, y2)."""
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    both = (high - low).clamp(min=0).prod(2)
    return both / (area[:, None] + area[None] - both)


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Returns the numbers of the boxes to keep, by falling score."""
    order = scores.argsort(descending=True)
    overlaps = iou(boxes[order])
    keep = torch.ones(len(order), dtype=torch.bool, device=boxes.device)
    for i in range(len(order)):
        if keep[i]:
            keep[i + 1 :] &= overlaps[i, i + 1 :] <= threshold
    return order[keep]


class Detector(nn.Module):
    """A backbone, a dense head over a grid of anchors, and non-maximum suppression for each image."""

    def __init__(self, classes: int = 3, stride: int = 8, threshold: float = 0.4) -> None:
        super().__init__()
        self.stride, self.threshold = stride, threshold
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Conv2d(32, 4 + classes, 1)

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        raw = self.head(self.backbone(images))
        rows, columns = raw.shape[-2:]
        y, x = torch.meshgrid(
            torch.arange(rows, device=raw.device), torch.arange(columns, device=raw.device), indexing="ij"
        )
        centre = (torch.stack([x, y]) + raw[:, :2].sigmoid()) * self.stride
        size = raw[:, 2:4].clamp(-2, 2).exp() * 4 * self.stride
        boxes = torch.cat([centre - size / 2, centre + size / 2], dim=1).flatten(2).transpose(1, 2)
        scores, labels = raw[:, 4:].sigmoid().flatten(2).max(dim=1)
        detections = []
        for box, score, label in zip(boxes, scores, labels, strict=True):
            likely = (score > 0.5).nonzero()[:, 0]
            keep = likely[nms(box[likely], score[likely], self.threshold)]
            detections.append({"boxes": box[keep], "scores": score[keep], "labels": label[keep]})
        return detections


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Returns the detector, ready for inference, and two images."""
    return Detector().eval(), (torch.rand(2, 3, 64, 64),)
