"""Causal decoders as they are served: whole passes, or token by token with a cache; windows, experts, adapters."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers

VOCABULARY, WIDTH, HEADS, HIDDEN, LONGEST = 50, 32, 4, 48, 64
DEPTH = WIDTH // HEADS
PROMPT, SHARED, ADAPTERS, EXPERTS, CHOSEN = 6, 6, 3, 4, 2
"""Tokens before the first step; common ones of ``decoder-shared``; adapters of a layer; networks of a mixture, and how
many compute a token."""


class Options(NamedTuple):
    """Variants: heads of keys and values, positions in view (0 for all), blocks, bound of scores (0 for none)."""

    groups: int = 2
    window: int = 0
    blocks: int = 2
    cap: float = 0.0
    experts: bool = False


class KeyValueCache:
    """Keys and values of all tokens so far, concatenated. Subclasses store them in other ways.

    Attributes:
        length: Number of tokens that were computed with it, which the caller advances.
        stored: Keys and values ``(B, groups, places, D)`` and the position of each place, by layer.
    """

    def __init__(self, *_: Any) -> None:
        self.length = 0
        self.stored: dict[int, tuple[Tensor, ...]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds keys and values ``(B, groups, s, D)``; returns those to attend to, with their positions."""
        self.append(layer, keys, values, positions)
        keys, values, positions = self.stored[layer]
        return keys, values, positions

    def append(self, layer: int, *new: Tensor) -> None:
        """Concatenates tensors ``(..., s, n)``, and positions ``(s,)``, to those stored."""
        pairs = zip(self.stored.get(layer, ()), new, strict=False)
        self.stored[layer] = tuple(torch.cat(pair, -min(pair[0].dim(), 2)) for pair in pairs) or new

    def crop(self, length: int) -> None:
        """Forgets all tokens from this position on."""
        self.length = min(self.length, length)
        for layer, parts in self.stored.items():
            self.stored[layer] = tuple(part.narrow(-min(part.dim(), 2), 0, self.length) for part in parts)


class GroupedAttention(nn.Module):
    """Causal self-attention with shared key heads, and rotary embeddings or, where scores are capped, ALiBi's biases.

    Attributes:
        grouped: True to leave the sharing to `scaled_dot_product_attention`, which otherwise gets repeated heads.
    """

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.options, self.layer, self.grouped = options, layer, False
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, options.groups * DEPTH, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(LONGEST), 100.0 ** -(torch.arange(0, DEPTH, 2) / DEPTH)).repeat(1, 2)
        self.cosines, self.sines = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())
        self.slopes = nn.Buffer(4.0 ** -torch.arange(1.0, 1 + HEADS).view(-1, 1, 1))

    def forward(self, x: Tensor, positions: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if not self.options.cap:
            q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v, held = (k, v, positions) if cache is None else cache.update(self.layer, k, v, positions)
        out: Tensor = self.out(self.attend(q, k, v, positions, held).transpose(1, 2).flatten(2))
        return out

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates pairs of elements by angles that grow with the position."""
        first, second = x.chunk(2, -1)
        return x * self.cosines[positions] + torch.cat((-second, first), -1) * self.sines[positions]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, held: Tensor) -> Tensor:
        """Computes attention of queries at `positions` to keys at the positions `held`; techniques may replace it."""
        if not self.grouped:
            k, v = (x.unsqueeze(2).expand(-1, -1, HEADS // x.size(1), -1, -1).flatten(1, 2) for x in (k, v))
        seen = visible(self.options.window, positions.unsqueeze(-1), held)
        if not self.options.cap:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.grouped)
        scores = self.options.cap * torch.tanh(q @ k.transpose(-2, -1) * (DEPTH**-0.5 / self.options.cap))
        biased = scores + self.slopes * (held - positions.unsqueeze(-1)).to(scores.dtype)
        return biased.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def visible(window: int, query: Tensor, key: Tensor) -> Tensor:
    """Marks the pairs of positions in which the query sees the key."""
    return (key <= query) & (key > query - window) if window else key <= query


class SwiGlu(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class SwiGluExperts(nn.Module):
    """Mixture of `SwiGlu` networks: a router chooses `CHOSEN` for each token, and their softmax weights the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(EXPERTS * HIDDEN, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(EXPERTS * WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(CHOSEN, dim=-1)
        # Weights of the chosen networks, (B, s, CHOSEN, out, in), as small batches are served.
        gate, up, down = (part.view(EXPERTS, -1, part.size(1))[chosen] for part in (self.gate, self.up, self.down))
        column = x[:, :, None, :, None]
        parts = (down @ (functional.silu(gate @ column) * (up @ column))).squeeze(-1)
        out: Tensor = (parts * scores.softmax(-1).unsqueeze(-1)).sum(-2)
        return out


class DecoderBlock(nn.Module):
    """Attention and a feed-forward network, each added to its input, which it takes after an RMSNorm."""

    def __init__(self, options: Options, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.attention = GroupedAttention(options, layer)
        self.network = SwiGluExperts() if options.experts else SwiGlu()

    def forward(self, x: Tensor, positions: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), positions, cache)
        out: Tensor = x + self.network(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Tokens ``(B, s)`` to logits ``(B, s, VOCABULARY)``; with a cache, tokens that follow those in the cache."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([DecoderBlock(options, layer) for layer in range(options.blocks)])
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        at = torch.arange(tokens.size(1), device=tokens.device) if positions is None else positions
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x, at, cache)
        out: Tensor = self.head(self.norm(x))
        return out


class Uncached(Decoder):
    """Decoder that takes the tokens after the prompt in turn, each by a whole pass where it has no cache."""

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        whole = super().forward
        if cache is not None:
            return whole(tokens, positions, cache)
        ends = range(PROMPT + 1, tokens.size(1) + 1)
        return torch.cat([whole(tokens[:, :PROMPT]), *(whole(tokens[:, :end])[:, -1:] for end in ends)], 1)


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


class AdaptedLinear(nn.Linear):
    """Linear layer with low-rank adapters; each of the `rows` has the weight ``W + scale * up @ down`` of its own."""

    rows: Tensor

    def __init__(self, plain: nn.Linear, rank: int = 4) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        self.down = nn.Parameter(torch.empty(ADAPTERS, rank, plain.in_features))
        self.up = nn.Parameter(torch.empty(ADAPTERS, plain.out_features, rank))
        self.scales = nn.Buffer(2.0 / (1.0 + torch.arange(ADAPTERS)).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight + self.change(self.rows)).transpose(1, 2)

    def change(self, rows: Tensor) -> Tensor:
        """Changes of the weight by an adapter for each row, ``(rows, out, in)``."""
        return self.scales[rows] * (self.up[rows] @ self.down[rows])


class AdaptedDecoder(nn.Module):
    """Decoder whose queries and values have adapters: tokens ``(B, s)`` and an adapter for each row to logits."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        for part in decoder.modules():
            if isinstance(part, GroupedAttention):
                part.q, part.v = AdaptedLinear(part.q), AdaptedLinear(part.v)

    @property
    def layers(self) -> list[AdaptedLinear]:
        """Layers with adapters."""
        return [layer for layer in self.modules() if isinstance(layer, AdaptedLinear)]

    def forward(self, tokens: Tensor, adapters: Tensor) -> Tensor:
        for layer in self.layers:
            layer.rows = adapters
        out: Tensor = self.decoder(tokens)
        return out


def _made(
    generator: torch.Generator, extent: int, *, kind: Any, options: Options, shape: tuple[int, int], shared: int
) -> Problem:
    module: nn.Module = (Uncached if kind is Uncached else Decoder)(options)
    module = initialise(module if isinstance(module, kind) else kind(module), generator)
    tokens = integers(generator, 0, VOCABULARY, shape[0], shape[1] + extent)
    tokens[:, :shared] = tokens[:1, :shared]
    # Neighbours have different adapters, and one adapter serves two rows.
    return Problem(module, (tokens, torch.arange(shape[0]) % ADAPTERS) if kind is AdaptedDecoder else (tokens,))


SERVED = frozenset(
    """eager sdpa-math sdpa-flash decode-dynamic decode-static decode-sliding decode-static-compiled decode-int8-cache
    decode-float8-cache prefill-chunked paged-attention prefix-cache gqa-sdpa flex-scores-eager flex-scores
    speculative-greedy speculative-sampled batch-invariant lora-unmerged lora-merged lora-batched liger-rms-norm
    liger-swiglu liger-rope""".split()
)
DECODED = frozenset(
    """eager decode-dynamic decode-static decode-static-compiled decode-int8-cache decode-float8-cache
    paged-attention""".split()
)
_HALF, _SINGLE = frozenset({"float32", "bfloat16", "float16"}), frozenset({"float32"})
"""Half precision would decide between tokens or experts of nearly equal scores."""
_CORE = frozenset({"decoder", "linear", "matmul", "resizable"})
_SDPA = _CORE | {"attention"}
_LONG, _SHORT = (2, 14), (2, 6)

WORKLOADS = (
    *(
        Workload(f"decoder{name}", summary,
            partial(_made, kind=kind, options=options, shape=shape, shared=SHARED if name == "-shared" else 0), 3,
            traits=traits, dtypes=_SINGLE if options.experts or kind is Greedy else _HALF,
            levels={"eager": 2, "eager/backward": 3}, techniques=SERVED)
        for name, summary, kind, options, shape, traits in (
            ("", "Two blocks with two key heads for four query heads.", Decoder, Options(), _LONG, _SDPA),
            ("-window", "One key head; the latest five positions in view.", Decoder, Options(1, 5), _LONG, _SDPA),
            ("-experts", "Two networks of four for each token.", Decoder, Options(experts=True), _LONG, _SDPA),
            ("-scores", "Soft-capped scores with ALiBi's biases.", Decoder, Options(cap=2.0), _LONG, _CORE),
            ("-shared", "Three prompts with the same beginning.", Decoder, Options(), (3, 10), _SDPA),
            ("-greedy", "Eight tokens, each the most likely next one.", Greedy, Options(blocks=3), _SHORT, _SDPA),
            ("-adapters", "Rows of a batch with three adapters.", AdaptedDecoder, Options(), (4, 8), _SDPA),
        )
    ),
    Workload("speed-decoding", "A prompt of 6 tokens and 34 more in turn, in a batch of 4; eager has no cache.",
        partial(_made, kind=Uncached, options=Options(), shape=(4, 40), shared=0), 4, frozenset({Mode.SPEED}), _SDPA,
        levels={"eager": 3, "decode-static-compiled": 3}, techniques=DECODED),
)  # fmt: skip
