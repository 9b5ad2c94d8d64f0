"""Mistakes of serving: caches, chunks, pages, speculation, batches and adapters; and correct ways to do the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn import functional

from accelcheck.selftest.faults.base import fault, single, variant
from accelcheck.selftest.faults.plant import calling, wrapping
from accelcheck.techniques.serving import batches, decoding, speculative
from accelcheck.workloads.decoders import ADAPTERS, Cache

if TYPE_CHECKING:
    from torch import Tensor

_RIGHT: dict[Any, Any] = {kind: kind.update for kind in (decoding.Fixed, decoding.Paged, decoding.Quantized, Cache)}
_AGREED, _FED = speculative.agreed, decoding.fed


def _patched(owner: Any, place: str, wrong: Any, strength: float) -> Any:
    return mock.patch.object(owner, place, wrong)


def _stale(cache: decoding.Paged, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
    keys, values, places = _RIGHT[decoding.Paged](cache, layer, *new)
    keys[1, :, : decoding.PAGE] = keys[0, :, : decoding.PAGE]
    return keys, values, places


def _exchanged(cache: decoding.Quantized, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
    _RIGHT[decoding.Quantized](cache, layer, *new)
    codes, scales, others, _, held = cache.stored[layer]
    return codes.to(scales.dtype) * scales, others.to(scales.dtype) * scales, held


def _forgetful(cache: decoding.Sliding, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
    keys, values, held = _RIGHT[Cache](cache, layer, *new)
    cache.stored[layer] = keys[:, :, 2 - cache.window :], values[:, :, 2 - cache.window :], held[2 - cache.window :]
    return keys, values, held


def _restarted(model: Any, cache: Cache, tokens: Tensor) -> Tensor:
    start, cache.length = cache.length, tokens.size(1)
    out: Tensor = model(tokens[:, start:], torch.arange(cache.length - start, device=tokens.device), cache)
    return out


def _shifted(cache: Cache, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
    keys, values, held = _RIGHT[Cache](cache, layer, *new)
    return keys, values, held - 1


def _crop(cache: Cache, length: int) -> None:
    cache.length = min(cache.length, length)


def _kept(layers: list[Any], before: list[Tensor]) -> None:
    for layer in layers:
        del layer.forward


def _one_by_one(module: Any, tokens: Tensor) -> Tensor:
    cache = Cache()
    return torch.cat([_FED(module, cache, tokens[:, : end + 1]) for end in range(tokens.size(1))], 1)


_D, _W, _G, _A = "decoder", "decoder-window", "decoder-greedy", "decoder-adapters"
_PATCHED: tuple[tuple[str, str, str, str, Any, str, Any], ...] = (
    ("cache-position", "Keys are written one place late.", _D, "decode-static", decoding.Fixed, "update",
     lambda cache, layer, k, v, at: _RIGHT[decoding.Fixed](cache, layer, k, v, at + 1)),
    ("cache-stale-page", "A page of another sequence is read.", _D, "paged-attention", decoding.Paged, "update", _stale),
    ("cache-scales", "Values are read with the scales of keys.", _D, "decode-int8-cache", decoding.Quantized, "update", _exchanged),
    ("cache-window", "A place that is still in view is dropped.", _W, "decode-sliding", decoding.Sliding, "update", _forgetful),
    ("chunk-mask", "Queries of a chunk see the key after their own.", _D, "prefill-chunked", Cache, "update", _shifted),
    ("chunk-positions", "Each chunk counts its positions from 0.", _D, "prefill-chunked", decoding, "fed", _restarted),
    ("speculative-accept", "The first token that the target rejects is kept.", _G, "speculative-greedy", speculative, "agreed",
     lambda proposed, chosen: min(len(proposed), _AGREED(proposed, chosen) + 1)),
    ("speculative-rollback", "Keys of rejected tokens stay in the cache.", _G, "speculative-greedy", Cache, "crop", _crop),
    ("speculative-residual", "A rejected token is drawn anew from all tokens.", _D, "speculative-sampled", speculative, "rest",
     lambda wanted, _: wanted),
    ("speculative-draft", "Every token of the draft is taken.", _D, "speculative-sampled", speculative, "drawn",
     lambda _, guessed, generator: (guessed.multinomial(speculative.DRAWS, replacement=True, generator=generator), 0.5)),
    ("lora-scale", "Adapters have the scale of the next one.", _A, "lora-batched", batches, "scale_of",
     lambda layer: layer.scales[(layer.rows + 1) % ADAPTERS]),
    ("lora-unmerge", "An adapter stays in the weights.", _A, "lora-merged", batches, "unmerge", _kept),
)  # fmt: skip

FAULTS = (
    *(
        fault(name, summary)(
            single(cell),
            around=partial(_patched, owner, place, wrong),
            technique=technique,
            emulated=True,
        )
        for name, summary, cell, technique, owner, place, wrong in _PATCHED
    ),
    fault("batch-row", "All rows get the result of the first one.")(
        single(_D), lambda _: wrapping(lambda call, x: call(x)[[0, 0]]), technique="batch-invariant"
    ),
    fault("batch-padding", "Padding takes the place of the first token.")(
        single(_D), lambda _: wrapping(lambda call, x: call(x * (x != x[:, :1]))), technique="batch-invariant"
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
