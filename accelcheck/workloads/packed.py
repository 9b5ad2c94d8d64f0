"""Self-attention over queries, keys and values packed in one tensor: sequences of equal and of different lengths."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import lengths, normal

HEADS, DEPTH = 2, 16


class Packed(nn.Module):
    """Self-attention that techniques may replace as a whole: ``qkv (B, S, 3, H, D)`` to ``(B, S, H, D)``."""

    __constants__ = ("causal",)

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal


class PackedAttention(Packed):
    """Self-attention of sequences with the length of the tensor."""

    def forward(self, qkv: Tensor) -> Tensor:
        parts = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        return out.transpose(1, 2).contiguous()


class VariableAttention(Packed):
    """Self-attention of sequences of ``lengths (B,)``: tokens beyond the end are masked, with outputs of zero."""

    def forward(self, qkv: Tensor, lengths: Tensor) -> Tensor:
        place = torch.arange(qkv.size(1), device=qkv.device)
        within = place < lengths.unsqueeze(-1)
        seen = within[:, None, None, :]
        if self.causal:
            seen = seen & (place <= place.unsqueeze(-1))
        parts = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=seen)
        return out.transpose(1, 2).masked_fill(~within[:, :, None, None], 0.0)


def _fixed(generator: torch.Generator, extent: int) -> Problem:
    # Two blocks of 128: kernels can skip the whole block above the diagonal.
    return Problem(PackedAttention(causal=True), (normal(generator, 2, 136 + extent, 3, HEADS, DEPTH),))


def _variable(generator: torch.Generator, extent: int, *, causal: bool) -> Problem:
    batch, length = 4, 40 + extent
    qkv = normal(generator, batch, length, 3, HEADS, DEPTH)
    # At least two tokens: over one, softmax is constant, and the key's gradient is rounding noise.
    return Problem(VariableAttention(causal=causal), (qkv, lengths(generator, batch, 2, length)))


_TRAITS = frozenset({"attention", "matmul", "packed", "resizable", "scriptable"})
_VARIABLE = _TRAITS | {"variable-length"}
# No NaN: implementations differ in what a NaN in a masked key does to queries.
_PROBES = frozenset({"slice", "zeros"})

WORKLOADS = (
    Workload("attention-packed", "Causal self-attention of one packed tensor, a little longer than a block of 128.",
        _fixed, 2, traits=_TRAITS, probes=_PROBES),
    Workload("attention-varlen", "Packed sequences of different lengths in one batch.",
        partial(_variable, causal=False), 2, traits=_VARIABLE, probes=_PROBES),
    Workload("attention-varlen-causal", "Packed sequences of different lengths in one batch, causal.",
        partial(_variable, causal=True), 3, traits=_VARIABLE, probes=_PROBES),
)  # fmt: skip
