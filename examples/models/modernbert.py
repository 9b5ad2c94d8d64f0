"""A ModernBERT of transformers, small: `accelcheck check examples/models/modernbert.py:make`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ModernBertConfig, ModernBertForSequenceClassification


def make() -> dict[str, Any]:
    """Returns the classifier with padded batches; it computes its loss itself."""
    config = ModernBertConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        global_attn_every_n_layers=3,
        local_attention=8,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    model = ModernBertForSequenceClassification(config).eval()
    lengths = torch.tensor([24, 17, 9, 20])
    mask = (torch.arange(24) < lengths[:, None]).long()
    batches = []
    for _ in range(2):
        tokens = torch.randint(3, 211, (4, 24)) * mask
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(3, (4,))})
    return {"model": model, "batches": batches, "loss": lambda out, _: out.loss, "optimizer": torch.optim.AdamW}
