"""A small Llama and a small mixture of experts of transformers: caches, formats and compilation.

Run ``pytest`` here: decoding with a cache equals one pass, and what is served or trained in another way equals eager.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

ROWS = [
    *("eager", "sdpa-math", "checkpoint-selective", "compile-regional"),
    *("float8-training-tensorwise", "float8-training-rowwise", "mxfp8", "mxfp4", "nvfp4"),
    *("int4-packed-gptq", "int4-packed-awq", "int8-bitsandbytes"),
]
"""Techniques of large models that apply to models of others. NF4 raises for 97 outputs on some CPUs: docs/findings.md."""


class Logits(nn.Module):
    """The model's logits alone, of one pass without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, use_cache=False).logits


def make(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig, **more: int) -> Logits:
    """A Llama with two key heads for four query heads, and random weights."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    chosen = config(vocab_size=97, num_hidden_layers=2, num_key_value_heads=2, **sizes, **more)
    return Logits(kind(chosen))


def make_mixture() -> Logits:
    """A Mixtral of the same sizes; two of four experts compute a token."""
    return make(MixtralForCausalLM, MixtralConfig, num_local_experts=4, num_experts_per_tok=2)


def tokens() -> tuple[Tensor]:
    """Two rows of ten tokens."""
    return (torch.arange(20).reshape(2, 10) * 7 % 97,)


@pytest.mark.accel(techniques=["eager", "sdpa-math", "hf-dynamic-cache", "hf-static-cache"])
@pytest.mark.parametrize("make", [make, make_mixture])
def test_decoding_with_a_cache(accel: Any, make: Any) -> None:
    accel.check(make(), tokens())


@pytest.mark.accel(techniques=ROWS)
@pytest.mark.parametrize("make", [make, make_mixture])
def test_serving_and_training_in_other_ways(accel: Any, make: Any) -> None:
    accel.check(make(), tokens())


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the tokens that follow."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.accel(techniques=["eager", "muon", "optimizer-in-backward"])
@pytest.mark.parametrize("make", [make, make_mixture])
def test_training_with_other_steps(accel: Any, make: Any) -> None:
    batches = [(*tokens(), tokens()[0].roll(-1, 1))]
    accel.check_training(make(), batches, next_tokens, partial(torch.optim.AdamW, lr=1e-3))
