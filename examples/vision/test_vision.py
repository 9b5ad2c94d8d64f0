"""A ResNet of timm, as it is. Run `pytest test_vision.py`, or `accelcheck check test_vision.py:make` for a table."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy


def make() -> dict[str, Any]:
    """The model with its batches, loss and optimizer; names are those of `accel.check_training`."""
    model = timm.create_model("test_resnet", num_classes=10)
    batches = [(torch.randn(4, 3, 48, 48), torch.arange(4) + step) for step in range(2)]
    return {"model": model, "batches": batches, "loss": cross_entropy, "optimizer": torch.optim.AdamW}


@pytest.mark.accel(techniques=["eager", "amp-bf16", "channels-last", "compile-aot-eager"])
def test_inference(accel: Any) -> None:
    accel.check(make()["model"], (torch.randn(4, 3, 48, 48),))


@pytest.mark.accel(techniques=["eager", "channels-last", "compile-aot-eager"])
def test_training(accel: Any) -> None:
    accel.check_training(**make())
