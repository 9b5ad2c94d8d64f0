"""A GPT-2 of transformers in training, with its dropout: `accelcheck check examples/models/gpt2.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def make() -> dict[str, Any]:
    """Returns the language model in training mode; it computes its loss itself."""
    config = GPT2Config(
        vocab_size=131,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    batches = []
    for _ in range(2):
        tokens = torch.randint(131, (4, 16))
        batches.append({"input_ids": tokens, "labels": tokens, "use_cache": False})
    return {"model": model, "batches": batches, "loss": lambda out, _: out.loss, "optimizer": torch.optim.AdamW}
