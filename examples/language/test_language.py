"""A Llama of transformers. Run `pytest test_language.py`, or `accelcheck check test_language.py:make` for a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make() -> dict[str, Any]:
    """The model with its batches, loss and optimizer; names are those of `accel.check_training`."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    tokens = torch.arange(48).reshape(2, 2, 12) * 7 % 97
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    return {"model": model, "batches": batches, "loss": lambda out, _: out.loss, "optimizer": torch.optim.AdamW}


@pytest.mark.accel(techniques=["eager", "amp-bf16", "compile-aot-eager", "sdpa-math"])
def test_inference(accel: Any) -> None:
    accel.check(make()["model"], keywords={"input_ids": torch.arange(24).reshape(2, 12), "use_cache": True})


@pytest.mark.accel(techniques=["eager", "amp-bf16", "compile-aot-eager"])
def test_training(accel: Any) -> None:
    accel.check_training(**make())
