"""A vision transformer, as it is: `pytest test_vision.py`, or `accelcheck check test_vision.py:make` for a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification


def make() -> dict[str, Any]:
    """The model with its batches, loss and optimizer; names are those of `accel.check_training`."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_labels": 10}
    model = ViTForImageClassification(
        ViTConfig(image_size=32, patch_size=8, num_hidden_layers=2, hidden_act="relu", **sizes)
    )
    batches = [{"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4) + step} for step in range(2)]
    return {"model": model, "batches": batches, "loss": lambda out, _: out.loss, "optimizer": torch.optim.AdamW}


@pytest.mark.accel(techniques=["eager", "amp-bf16", "channels-last", "compile-aot-eager"])
def test_inference(accel: Any) -> None:
    accel.check(make()["model"], (torch.randn(4, 3, 32, 32),))


@pytest.mark.accel(techniques=["eager", "amp-bf16"])
def test_training(accel: Any) -> None:
    accel.check_training(**make())
