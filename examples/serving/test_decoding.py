"""A small Llama of transformers: decoding with its caches equals one pass. Run `pytest test_decoding.py` here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Logits(nn.Module):
    """The model's logits alone, of one pass without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, use_cache=False).logits


def make() -> Logits:
    """A Llama with two key heads for four query heads, and random weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    return Logits(LlamaForCausalLM(config))


@pytest.mark.accel(techniques=["eager", "sdpa-math", "hf-dynamic-cache", "hf-static-cache"])
def test_decoding_with_a_cache(accel: Any) -> None:
    accel.check(make(), (torch.arange(20).reshape(2, 10) * 7 % 97,))
