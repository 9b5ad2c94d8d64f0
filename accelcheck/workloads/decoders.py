"""Causal decoders as they are served: whole passes, or token by token with a cache; windows, experts, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY, LONGEST = 50, 64
SHARED = 6
"""Number of tokens with which all prompts of ``decoder-shared`` begin."""
CHOSEN = 2
"""Number of experts that compute a token."""


@dataclass(frozen=True)
class Options:
    """Sizes and variants of a `Decoder`.

    Attributes:
        groups: Heads of keys and values, which the query heads share.
        window: Latest positions that a query sees; 0 for all.
        experts: Experts of each block; 0 for one network that computes every token.
        cap: Bound of soft-capped scores, with ALiBi's biases in place of rotations; 0 for neither.
    """

    groups: int = 2
    window: int = 0
    experts: int = 0
    cap: float = 0.0
    width: int = 32
    heads: int = 4
    hidden: int = 48
    blocks: int = 2

    @property
    def depth(self) -> int:
        """Width of a head."""
        return self.width // self.heads


class Cache:
    """Keys and values of all tokens so far, concatenated. Subclasses store them in other ways.

    Attributes:
        length: Number of tokens that a model has computed with it; the caller advances it.
        stored: Keys and values ``(B, groups, places, D)`` and the position of each place, by layer.
    """

    def __init__(self) -> None:
        self.length = 0
        self.stored: dict[int, tuple[Tensor, ...]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds keys and values ``(B, groups, s, D)``; returns those to attend to, with their positions."""
        self._append(layer, keys, values, positions)
        return self._read(layer)

    def _append(self, layer: int, *new: Tensor) -> None:
        """Concatenates along the places: the last dimension of positions, the last but one of all others."""
        old = self.stored.get(layer)
        if old is not None:
            new = tuple(torch.cat(pair, -2 if pair[0].dim() > 2 else -1) for pair in zip(old, new, strict=True))
        self.stored[layer] = new

    def _read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values, positions = self.stored[layer]
        return keys, values, positions

    def crop(self, length: int) -> None:
        """Forgets all tokens from this position on."""
        self.length = min(self.length, length)
        for layer, parts in self.stored.items():
            self.stored[layer] = tuple(p[..., :length, :] if p.dim() > 2 else p[..., :length] for p in parts)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, rotary embeddings or ALiBi, and a window.

    Attributes:
        grouped: True to leave the sharing of key heads to `scaled_dot_product_attention`; False to repeat them.
    """

    cosines: Tensor
    sines: Tensor
    slopes: Tensor

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.options, self.layer, self.grouped = options, layer, False
        width, narrow = options.width, options.groups * options.depth
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        rates = 100.0 ** -(torch.arange(0, options.depth, 2) / options.depth)
        angles = torch.outer(torch.arange(LONGEST), rates).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.register_buffer("slopes", 2.0 ** (-8 / options.heads * torch.arange(1.0, 1 + options.heads)), False)

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.options.depth).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        if not self.options.cap:
            q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v, held = (k, v, positions) if cache is None else cache.update(self.layer, k, v, positions)
        out: Tensor = self.out(self.attend(q, k, v, positions, held).transpose(1, 2).reshape(batch, length, width))
        return out

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates pairs of elements by angles that grow with the position: ``(B, heads, s, D)`` to the same."""
        first, second = x.chunk(2, -1)
        cosine, sine = (table[positions].unsqueeze(-3) for table in (self.cosines, self.sines))
        return x * cosine + torch.cat((-second, first), -1) * sine

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, held: Tensor) -> Tensor:
        """Computes attention of queries at `positions` to keys at the positions `held`; techniques may replace it."""
        if not self.grouped:
            k, v = (repeated(part, q.size(1)) for part in (k, v))
        seen = self.seen(positions, held).unsqueeze(-3)
        if not self.options.cap:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.grouped)
        scores = self.options.cap * torch.tanh(q @ k.transpose(-2, -1) * self.options.depth**-0.5 / self.options.cap)
        distances = held.unsqueeze(-2) - positions.unsqueeze(-1)
        biased = scores + self.slopes[:, None, None] * distances.unsqueeze(-3).to(scores.dtype)
        return biased.masked_fill(~seen, -torch.inf).softmax(-1) @ v

    def seen(self, positions: Tensor, held: Tensor) -> Tensor:
        """Mask ``(..., queries, keys)``: True where a query sees a key."""
        queries, keys = positions.unsqueeze(-1), held.unsqueeze(-2)
        return (keys <= queries) & (keys > queries - self.options.window) if self.options.window else keys <= queries


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeats each head of ``(B, groups, n, D)``, so that there are `heads`."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.size(1), -1, -1).flatten(1, 2)


class SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(options.width, options.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(options.hidden, options.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Mixture of `SwiGlu` networks: a router chooses `CHOSEN` for each token, and their softmax weights the sum."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.experts = options.experts
        self.router = nn.Linear(options.width, options.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(options.experts * options.hidden, options.width)) for _ in "gu")
        self.down = nn.Parameter(torch.empty(options.experts * options.width, options.hidden))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(CHOSEN, dim=-1)
        # Weights of the chosen experts, (B, s, CHOSEN, out, in), as small batches are served.
        gate, up, down = (w.view(self.experts, -1, w.size(1))[chosen] for w in (self.gate, self.up, self.down))
        column = x[:, :, None, :, None]
        out: Tensor = (down @ (functional.silu(gate @ column) * (up @ column))).squeeze(-1)
        return (out * scores.softmax(-1).unsqueeze(-1)).sum(-2)


class Block(nn.Module):
    """Attention and a feed-forward network, each added to its input, which it takes after an RMSNorm."""

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(options.width, eps=1e-5), nn.RMSNorm(options.width, eps=1e-5)
        self.attention = Attention(options, layer)
        self.network = Experts(options) if options.experts else SwiGlu(options)

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, cache)
        out: Tensor = x + self.network(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Tokens ``(B, s)`` to logits ``(B, s, VOCABULARY)``; with a cache, tokens that follow those in the cache."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.blocks = nn.ModuleList([Block(options, layer) for layer in range(options.blocks)])
        self.norm = nn.RMSNorm(options.width, eps=1e-5)
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, cache)
        out: Tensor = self.head(self.norm(x))
        return out


class Greedy(nn.Module):
    """Greedy generation by whole passes: prompts ``(B, s)`` to the next `count` tokens, and the logits of each."""

    def __init__(self, decoder: Decoder, count: int = 8) -> None:
        super().__init__()
        self.decoder, self.count = decoder, count

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = []
        for _ in range(self.count):
            logits.append(self.decoder(tokens)[:, -1])
            tokens = torch.cat((tokens, logits[-1].argmax(-1, keepdim=True)), 1)
        return {"tokens": tokens[:, -self.count :].clone(), "logits": torch.stack(logits, 1)}


class Sampled(nn.Module):
    """Distribution of the token that follows each prompt: ``(B, s)`` to ``(B, VOCABULARY)``."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(tokens)[:, -1].softmax(-1)
        return out


class Adapted(nn.Linear):
    """Linear layer with low-rank adapters; row b of a batch uses the weight ``W + scale * up @ down`` of its adapter.

    Attributes:
        rows: Adapter of each row, which `AdaptedDecoder` sets.
    """

    rows: Tensor
    scales: Tensor

    def __init__(self, inputs: int, outputs: int, adapters: int, rank: int = 4) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.down = nn.Parameter(torch.empty(adapters, rank, inputs))
        self.up = nn.Parameter(torch.empty(adapters, outputs, rank))
        self.register_buffer("scales", 2.0 / (1.0 + torch.arange(adapters)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.change(self.rows)).transpose(1, 2)

    def change(self, adapter: Tensor) -> Tensor:
        """Change of the weight by an adapter, ``(out, in)``, or by several."""
        return self.scales[adapter][..., None, None] * (self.up[adapter] @ self.down[adapter])


class AdaptedDecoder(nn.Module):
    """Decoder whose queries and values have adapters: tokens ``(B, s)`` and an adapter for each row to logits."""

    def __init__(self, decoder: Decoder, adapters: int = 3) -> None:
        super().__init__()
        self.decoder, self.adapters = decoder, adapters
        for part in (block.attention for block in decoder.blocks):
            part.q, part.v = (Adapted(layer.in_features, layer.out_features, adapters) for layer in (part.q, part.v))

    def layers(self) -> list[Adapted]:
        """Layers with adapters."""
        return [layer for layer in self.modules() if isinstance(layer, Adapted)]

    def forward(self, tokens: Tensor, adapters: Tensor) -> Tensor:
        for layer in self.layers():
            layer.rows = adapters
        out: Tensor = self.decoder(tokens)
        return out


def _made(
    generator: torch.Generator,
    extent: int,
    *,
    options: Options,
    around: Callable[[Decoder], nn.Module] | None = None,
    batch: int = 2,
    length: int = 14,
    shared: int = 0,
) -> Problem:
    decoder = Decoder(options)
    module = decoder if around is None else around(decoder)
    initialise(module, generator)
    tokens = integers(generator, 0, VOCABULARY, batch, length + extent)
    tokens[:, :shared] = tokens[:1, :shared]
    if not isinstance(module, AdaptedDecoder):
        return Problem(module, (tokens,))
    # Neighbours differ, and one adapter serves two rows.
    return Problem(module, (tokens, torch.arange(batch) % module.adapters))


_ANY = frozenset({"float32", "bfloat16", "float16"})
_SINGLE = frozenset({"float32"})
"""Dtypes of decoders that choose: half precision would decide between two tokens or experts of nearly equal scores."""
_CORE = frozenset({"decoder", "linear", "matmul", "resizable"})


def _workload(name: str, summary: str, dtypes: frozenset[str] = _ANY, *more: str, **made: object) -> Workload:
    return Workload(
        name, summary, partial(_made, **made), 3, traits=_CORE | {*more}, dtypes=dtypes, levels={"eager": 2}
    )


WORKLOADS = (
    _workload(
        "decoder", "Two blocks, four query heads on two key heads.", _ANY, "attention", "blocks", options=Options()
    ),
    _workload(
        "decoder-window",
        "Queries share one key head, and see the latest five positions.",
        _ANY,
        "attention",
        "blocks",
        options=Options(groups=1, window=5),
    ),
    _workload(
        "decoder-experts",
        "A router chooses two of four networks for each token.",
        _SINGLE,
        "attention",
        "blocks",
        options=Options(experts=4),
    ),
    _workload("decoder-scores", "Scores are soft-capped and biased by distance.", _ANY, options=Options(cap=2.0)),
    _workload(
        "decoder-shared", "Three prompts with the same beginning.", _ANY, "attention", options=Options(), batch=3, shared=SHARED
    ),
    _workload(
        "decoder-greedy",
        "Eight tokens, each the most likely one after those before it.",
        _SINGLE,
        "attention",
        options=Options(blocks=3),
        around=Greedy,
        length=6,
    ),
    _workload(
        "decoder-sampled",
        "Probabilities of the token after each prompt.",
        _ANY,
        "attention",
        options=Options(blocks=3),
        around=Sampled,
        length=6,
    ),
    _workload(
        "decoder-adapters",
        "Rows of a batch with three adapters of queries and values.",
        _ANY,
        "attention",
        options=Options(),
        around=AdaptedDecoder,
        batch=4,
        length=8,
    ),
)
