"""Two techniques of your own: a model of transformers decodes token by token, with each of two caches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from accelcheck.api import Code, Device, Evidence, Mode, Program, Technique, Unsupported, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.api import Log

PREFILL = 4


class CachedDecoding(Technique):
    """Logits of a prefill and of single tokens after it, in place of those of one pass.

    Args:
        name: Name of the technique.
        make: ``make(config, places)`` makes the cache.
    """

    family = "example"
    promise = "Decoding with a cache gives the logits of one pass over all tokens."
    source = "https://huggingface.co/docs/transformers/kv_cache"
    modes = frozenset({Mode.FORWARD})

    def __init__(self, name: str, make: Callable[[Any, int], Any]) -> None:
        self.name = name
        self.make = make

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        model: Any = getattr(program.module, "model", None)
        if not hasattr(model, "config"):
            raise Unsupported(unsupported(Code.NO_FEATURE, "the module has no language model of transformers"))
        program.call = partial(self.decode, program, model)

    def decode(self, program: Program, model: Any, tokens: Tensor) -> Tensor:
        """Computes the logits ``(B, s, vocabulary)`` of ``tokens (B, s)``."""
        cache = self.make(model.config, tokens.size(1))
        ends = [PREFILL, *range(PREFILL + 1, tokens.size(1) + 1)]
        out = []
        for start, end in zip([0, *ends], ends, strict=False):
            out.append(model(tokens[:, start:end], past_key_values=cache, use_cache=True).logits)
        program.extras["cached"] = int(cache.get_seq_length()), len(ends)
        return torch.cat(out, 1)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        cached, passes = program.extras["cached"]
        length = program.inputs[0].size(1)
        yield Evidence(f"tokens in the cache = {length}", cached, engaged=cached == length)
        ran = log.count("aten::embedding")
        yield Evidence(f"passes, by their embeddings = {passes}", ran, engaged=ran == passes > 1)


def growing(config: Any, places: int) -> Any:
    """Makes a cache that grows."""
    return DynamicCache(config=config)


def fixed(config: Any, places: int) -> Any:
    """Makes a cache with room for this many tokens."""
    return StaticCache(config=config, max_cache_len=places)


def pytest_accel_techniques() -> list[Technique]:
    """Registers the techniques."""
    return [CachedDecoding("hf-dynamic-cache", growing), CachedDecoding("hf-static-cache", fixed)]
