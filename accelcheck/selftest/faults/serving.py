"""Mistakes of serving: caches, chunks, pages, speculation, batches and adapters; and correct ways to do the same."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.selftest.faults.base import HALVES, alike, single, variant
from accelcheck.selftest.faults.plant import calling, wrapping
from accelcheck.techniques.serving import batches, decoding, speculative
from accelcheck.workloads.decoders import ADAPTERS, KeyValueCache

_AGREED, _FED, _PAGE = speculative.agreed, decoding.fed, decoding.PAGE
_CACHES = (decoding.FixedCache, decoding.PagedCache, decoding.QuantizedCache, decoding.SlidingCache, KeyValueCache)
_RIGHT: dict[Any, Any] = {kind: kind.update for kind in _CACHES}


def _patched(owner: Any, place: str, wrong: Any, strength: float) -> Any:
    return mock.patch.object(owner, place, wrong)


def _reading(kind: Any, change: Any) -> tuple[Any, str, Any]:
    """Patch of what a cache returns: ``change(keys, values, positions)``."""
    return kind, "update", lambda *given: change(*_RIGHT[kind](*given))


def _one_by_one(module: Any, tokens: Tensor) -> Tensor:
    cache = KeyValueCache()
    return torch.cat([_FED(module, cache, tokens[:, : end + 1]) for end in range(tokens.size(1))], 1)


_D, _W, _G, _A = "decoder", "decoder-window", "decoder-greedy", "decoder-adapters"
_GREEDY, _SAMPLED, _BATCH = "speculative-greedy", "speculative-sampled", "batch-invariant"

_ROWS: tuple[tuple[str, str, str, str, tuple[Any, str, Any]], ...] = (
    ("cache-position", "Keys are written one place late.", _D, "decode-static",
     (decoding.FixedCache, "update", lambda *given: _RIGHT[decoding.FixedCache](*given[:4], given[4] + 1))),
    ("cache-stale-page", "A page of another sequence is read.", _D, "paged-attention", _reading(decoding.PagedCache,
     lambda k, v, at: (torch.cat((k[:1, :, :_PAGE].expand_as(k[:, :, :_PAGE]), k[:, :, _PAGE:]), 2), v, at))),
    ("cache-heads", "Values of another head are read.", _D, "decode-int8-cache",
     _reading(decoding.QuantizedCache, lambda k, v, at: (k, v.roll(1, 1), at))),
    ("cache-window", "The oldest place in view is not read.", _W, "decode-sliding",
     _reading(decoding.SlidingCache, lambda k, v, at: (k[:, :, 1:], v[:, :, 1:], at[1:]))),
    ("chunk-mask", "Queries of a chunk see the key after their own.", _D, "prefill-chunked",
     _reading(KeyValueCache, lambda k, v, at: (k, v, at - 1))),
    ("chunk-positions", "Each chunk counts its positions from 0.", _D, "prefill-chunked",
     (decoding, "fed", lambda model, *given: _FED(lambda x, at, cache: model(x, at - at[0], cache), *given))),
    ("speculative-accept", "The first token that the target rejects is kept.", _G, _GREEDY,
     (speculative, "agreed", lambda ours, theirs: min(len(ours), _AGREED(ours, theirs) + 1))),
    ("speculative-rollback", "Keys of rejected tokens stay in the cache.", _G, _GREEDY,
     (KeyValueCache, "crop", lambda cache, length: setattr(cache, "length", min(cache.length, length)))),
    ("speculative-residual", "A rejected token is drawn anew from all tokens.", _D, _SAMPLED,
     (speculative, "rest", lambda wanted, _: wanted)),
    ("speculative-draft", "Every token of the draft is taken.", _D, _SAMPLED, (speculative, "drawn",
     lambda _, ours, seed: (ours.multinomial(speculative.DRAWS, replacement=True, generator=seed), 0.5))),
    ("lora-scale", "Adapters have the scale of the next one.", _A, "lora-batched",
     (batches, "scale_of", lambda layer: layer.scales[(layer.rows + 1) % ADAPTERS])),
    ("lora-unmerge", "An adapter stays in the weights.", _A, "lora-merged",
     (batches, "unmerge", lambda layers, _: [vars(layer).pop("forward") for layer in layers])),
)  # fmt: skip

fault = alike(absent=dict.fromkeys(HALVES, "positions and rows are those of float32, where it is planted"))

FAULTS = (
    *(
        fault(name, summary)(single(cell), around=partial(_patched, *patch), technique=technique, emulated=True)
        for name, summary, cell, technique, patch in _ROWS
    ),
    fault("batch-row", "All rows get the result of the first one.")(
        single(_D), lambda _: wrapping(lambda call, x: call(x)[[0, 0]]), technique=_BATCH
    ),
    fault("batch-padding", "Padding takes the place of the first token.")(
        single(_D), lambda _: wrapping(lambda call, x: call(x * (x != x[:, :1]))), technique=_BATCH
    ),
)

VARIANTS = (
    variant("decoder-padded", "Padding after the last token.")(
        single(_D), lambda: calling(lambda module, x: module(functional.pad(x, (0, 2)))[:, :-2].contiguous())
    ),
    variant("decoder-one-by-one", "Every token in a pass of its own.")(
        (single("decoder-scores"), single(_W)), lambda: calling(_one_by_one)
    ),
)
