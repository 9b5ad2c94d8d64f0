"""Scaled dot-product attention: causal, masked, ragged, cross, one row beyond a tile, and with projections."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import integers, lengths, normal, of_normal


class Attention(nn.Module):
    """Attention of ``q (B, H, Sq, D)`` over ``k, v (B, H, Sk, D)``; causal counts from the top left, as torch says."""

    __constants__ = ("causal",)

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class MaskedAttention(nn.Module):
    """Attention with a bool mask broadcastable to ``(B, H, Sq, Sk)``: True where a query sees a key."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class RaggedAttention(nn.Module):
    """Attention over the first ``lengths (B,)`` keys of each sequence of a padded batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(k.size(2), device=k.device) < lengths.unsqueeze(-1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])


class MultiHeadAttention(nn.Module):
    """Self-attention with projections, ``(B, S, width)`` to the same.

    The packed projection has no bias: softmax cancels that of the keys, and its gradient would be rounding noise.
    """

    __constants__ = ("causal", "heads")

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size(0), x.size(1), x.size(2)
        # (B, S, 3 * width) -> (3, B, H, S, D): query, key and value are strided views, as in real models.
        packed = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(packed[0], packed[1], packed[2], is_causal=self.causal)
        out: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return out


def _qkv(generator: torch.Generator, queries: int, keys: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    q = normal(generator, 2, 2, queries, depth)
    return q, normal(generator, 2, 2, keys, depth), normal(generator, 2, 2, keys, depth)


def _plain(generator: torch.Generator, extent: int, *, causal: bool) -> Problem:
    return Problem(Attention(causal=causal), _qkv(generator, 48 + extent, 48 + extent, 16))


def _past_tile(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Attention(causal=True), _qkv(generator, 65, 65, 32))


def _cross(generator: torch.Generator, extent: int, *, causal: bool) -> Problem:
    return Problem(Attention(causal=causal), _qkv(generator, 24 + extent, 40 + extent, 32))


def _masked(generator: torch.Generator, extent: int) -> Problem:
    length = 40 + extent
    inputs = _qkv(generator, length, length, 16)
    # Each query sees itself, so that no row is masked completely, and about two thirds of the other keys.
    mask = (integers(generator, 0, 3, 2, 1, length, length) > 0) | torch.eye(length, dtype=torch.bool)
    return Problem(MaskedAttention(), (*inputs, mask))


def _lower_right(generator: torch.Generator, extent: int) -> Problem:
    queries, keys = 24 + extent, 40 + extent
    # The last query sees the last key, as when tokens are decoded after a prefix.
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return Problem(MaskedAttention(), (*_qkv(generator, queries, keys, 16), mask))


def _empty_row(generator: torch.Generator, extent: int) -> Problem:
    length = 24 + extent
    inputs = _qkv(generator, length, length, 16)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[5] = False
    return Problem(MaskedAttention(), (*inputs, mask))


def _ragged(generator: torch.Generator, extent: int) -> Problem:
    length = 40 + extent
    inputs = tuple(normal(generator, 4, 2, length, 16) for _ in range(3))
    # At least two keys: over one, softmax is constant, and the key's gradient is rounding noise.
    return Problem(RaggedAttention(), (*inputs, lengths(generator, 4, 2, length)))


_FIXED = frozenset({"attention", "matmul", "scriptable"})
_TRAITS = _FIXED | {"resizable"}

_NONE = frozenset[str]()
_PROBES = frozenset({"zeros", "one-hot-values", "sharp", "nan[0]"})

WORKLOADS = (
    Workload("attention-causal", "Causal self-attention.",
        partial(_plain, causal=True), 1, traits=_TRAITS, probes=_PROBES | {"future", "slice"}),
    Workload("attention", "Attention in which every query sees every key.",
        partial(_plain, causal=False), 2, traits=_TRAITS, probes=_PROBES | {"slice"}),
    Workload("attention-65",
        "Causal attention over 65 positions, one more than a tile of 64: shows leaks and stale rows in the tail.",
        _past_tile, 2, traits=_FIXED, probes=_PROBES | {"future"}),
    *(
        Workload(name, summary, make, level, traits=_TRAITS, probes=_PROBES | further)
        for name, summary, make, level, further in (
            ("attention-mask", "Attention with a boolean mask that differs between sequences.", _masked, 2, _NONE),
            ("attention-ragged", "Attention over padded sequences with their lengths in a tensor, one of them 2.",
                _ragged, 2, _NONE),
            ("attention-cross", "Attention with fewer queries than keys.", partial(_cross, causal=False), 2, _NONE),
            ("attention-cross-causal",
                "Fewer queries than keys, causal from the top left: shows a mask aligned to the bottom right.",
                partial(_cross, causal=True), 3, _NONE),
            ("attention-cross-right",
                "Fewer queries than keys, causal from the bottom right by a mask: shows one aligned to the top left.",
                _lower_right, 3, {"future"}),
        )
    ),
    Workload("attention-empty-row", "Attention with a query that sees no key: its output and its gradient are zeros.",
        _empty_row, 3, traits=_TRAITS),
    Workload("multi-head-attention", "Causal self-attention with projections.",
        partial(of_normal, make=partial(MultiHeadAttention, 64, 4, causal=True), shape=(2, 32, 64), axis=1), 2,
        traits=_TRAITS | {"linear"}),
)  # fmt: skip
