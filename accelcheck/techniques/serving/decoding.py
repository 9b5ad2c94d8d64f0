"""Decoding with a cache: token by token or in chunks, after a shared prefix, and compiled once for all steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import graphs, recompilations, reset_compiler
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import ProfilerLog, exactly
from accelcheck.techniques.quantization.float8 import WeightOnly
from accelcheck.techniques.serving import caches
from accelcheck.techniques.serving.caches import JUNK, EmulatedCache, PagedCache, QuantizedCache, StaticCache
from accelcheck.workloads.decoders import Cache, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.core.case import Evidence as Seen
    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

PREFILL, CHUNK = 6, 5
"""Numbers of tokens computed before the first step, and in each chunk."""
SPARE = 3
"""Places that a cache of fixed size has beyond the last token."""
_STATE = "serving"
"""Key in `Program.extras` of the sizes of the passes of a run, and its cache."""
TRANSFORMERS = "https://huggingface.co/docs/transformers/kv_cache"


class Serving(Technique):
    """Base class of techniques that serve the models of `accelcheck.workloads.decoders`."""

    family = "kv-cache"
    source = TRANSFORMERS
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    requires = frozenset({"decoder"})
    modes = frozenset({Mode.FORWARD})
    timed = False

    def __init__(self, name: str, promise: str, *workloads: str, **options: Any) -> None:
        """Takes the workloads that it runs with, all of them one level early, and attributes of a class."""
        self.name, self.promise = name, promise
        self.workloads = self.early = frozenset(workloads)
        vars(self).update(options)


def only(program: Program, kind: type[nn.Module]) -> Any:
    """Returns the program's module.

    Raises:
        Unsupported: It is of another class.
    """
    if not isinstance(program.module, kind):
        raise Unsupported(unsupported(Code.NO_FEATURE, f"serves a {kind.__name__}, not {type(program.module).__name__}"))
    return program.module


def fed(model: Callable[..., Tensor], cache: Cache, tokens: Tensor) -> Tensor:
    """Computes those of ``tokens (B, n)`` that the cache lacks; returns their logits."""
    start, cache.length = cache.length, tokens.size(1)
    return model(tokens[:, start:], torch.arange(start, cache.length, device=tokens.device), cache)


class Decoding(Serving):
    """Passes over parts of the tokens, with a cache.

    Attributes:
        cache: ``cache(decoder, batch, places)`` makes the cache.
        chunk: Size of the passes; 1 for a prefill of `PREFILL` and then one token a pass.
    """

    cache: Callable[[Decoder, int, int], Cache]
    chunk = 1

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        decoder: Decoder = only(program, Decoder)
        program.extras[_STATE] = [], None
        step = self.step(decoder, device)

        def call(tokens: Tensor) -> Tensor:
            length = tokens.size(1)
            ends = [*range(PREFILL if self.chunk == 1 else self.chunk, length, self.chunk), length]
            cache = self.made(program, decoder, tokens)
            sizes, out = [], []
            for end in ends:
                sizes.append(end - cache.length)
                out.append(fed(step if sizes[-1] == 1 else decoder, cache, tokens[:, :end]))
            program.extras[_STATE] = sizes, cache
            return torch.cat(out, 1)

        program.call = call

    def made(self, program: Program, decoder: Decoder, tokens: Tensor) -> Cache:
        """Makes an empty cache for a batch of tokens."""
        return self.cache(decoder, tokens.size(0), tokens.size(1) + SPARE)

    def step(self, decoder: Decoder, device: Device) -> Callable[..., Tensor]:
        """Makes the function that computes a single token."""
        return decoder

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from self.passes(program, log)
        _, cache = program.extras[_STATE]
        length = program.inputs[0].size(1)
        wanted = min(length, cache.window) if isinstance(cache, caches.SlidingCache) else length
        yield exactly("places with keys, of each sequence", min(filled(cache, at) for at in cache.stored), wanted)
        if isinstance(cache, QuantizedCache):
            dtypes = {str(part.dtype) for parts in cache.stored.values() for part in (parts[0], parts[2])}
            yield Evidence(f"keys and values are stored as {self.stored}", ", ".join(dtypes), dtypes == {self.stored})

    stored = ""
    """Dtype of quantized keys and values."""

    def passes(self, program: Program, log: Log) -> Iterable[Seen]:
        """Yields evidence that each token was computed once, in as many passes as the run has parts."""
        sizes, _ = program.extras[_STATE]
        yield exactly("tokens computed, of each sequence", sum(sizes), program.inputs[0].size(1))
        yield exactly("passes, by their embeddings", log.count("aten::embedding"), len(sizes))
        yield exactly("tokens of the largest pass after the first", max(sizes[1:], default=0), self.chunk)


def filled(cache: Cache, layer: int) -> int:
    """Counts the places of a sequence that hold keys."""
    keys = cache.stored[layer][0].float()
    if isinstance(cache, PagedCache):
        return int((keys[cache.tables[0]] != JUNK).any(-1)[..., 0].sum())
    return int((keys[0, 0] != 0).any(-1).sum())


class Packed(Decoding):
    """Decoding with a quantized cache, whose oracle emulates the scheme."""

    dtypes = ("float32",)
    grid: Callable[[], nn.Module]

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if self.stored == "torch.int8" else WeightOnly().capability(device)

    @property
    def oracle(self) -> str:
        return f"cache-{self.stored}"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return EmulatedCache(module, self.grid, len(module.blocks)) if isinstance(module, Decoder) else module


class CompiledStep(Decoding):
    """Single-token steps in one compiled graph, with a cache of fixed size that is used again in every run."""

    watch = ProfilerLog
    level = 2
    warmups = 1

    def capability(self, device: Device) -> Capability:
        return compiler_capability(device)

    def made(self, program: Program, decoder: Decoder, tokens: Tensor) -> Cache:
        kept: Cache = program.extras.setdefault("kept", {}).get(tokens.shape) or super().made(program, decoder, tokens)
        program.extras["kept"][tokens.shape], kept.length = kept, 0
        return kept

    def step(self, decoder: Decoder, device: Device) -> Callable[..., Tensor]:
        reset_compiler()
        step: Callable[..., Tensor] = torch.compile(decoder, backend=backend_for(device), dynamic=False, fullgraph=True)
        return step

    def passes(self, program: Program, log: Log) -> Iterable[Seen]:
        sizes, _ = program.extras[_STATE]
        yield exactly("graphs compiled for all steps", graphs(), 1)
        yield exactly("recompilations", recompilations(), 0)
        yield exactly("compiled steps run", entered(log).total(), sizes.count(1))

    def finish(self) -> None:
        reset_compiler()


class SharedPrefix(Serving):
    """Beginning that all sequences share, computed once; each sequence continues from its cache."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        decoder: Decoder = only(program, Decoder)

        def call(tokens: Tensor) -> Tensor:
            shared = int((tokens == tokens[:1]).all(0).long().cumprod(0).sum())
            if not shared:
                raise Unsupported(unsupported(Code.NO_EFFECT, "these sequences have no common beginning"))
            cache, batch = Cache(), len(tokens)
            out = fed(decoder, cache, tokens[:1, :shared])
            forked(cache, batch)
            program.extras[_STATE] = shared, tokens.size(1)
            return torch.cat((out.expand(batch, -1, -1), fed(decoder, cache, tokens)), 1)

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        shared, length = program.extras.get(_STATE, (0, 0))
        yield Evidence("tokens of the beginning, computed once", shared, engaged=0 < shared < length)
        yield exactly("passes, by their embeddings", log.count("aten::embedding"), 2)


def forked(cache: Cache, batch: int) -> None:
    """Lets `batch` sequences continue from the cache of one."""
    for layer, (keys, values, positions) in cache.stored.items():
        cache.stored[layer] = (*(part.expand(batch, -1, -1, -1) for part in (keys, values)), positions)


def growing(decoder: Decoder, batch: int, places: int) -> Cache:
    """Makes a cache that grows."""
    return Cache()


def sliding(decoder: Decoder, batch: int, places: int) -> Cache:
    """Makes a cache of the decoder's window."""
    return caches.SlidingCache(decoder.options.window or places)


def packed(pack: Callable[[Tensor], tuple[Tensor, Tensor]], decoder: Decoder, batch: int, places: int) -> Cache:
    """Makes a cache that packs keys and values."""
    return QuantizedCache(pack)


_PLAIN, _WINDOW, _SHARED = "decoder", "decoder-window", "decoder-shared"
_VLLM = "https://docs.vllm.ai/en/latest"

TECHNIQUES: tuple[Technique, ...] = (
    Decoding(
        "decode-dynamic",
        "Decoding token by token with a growing cache gives the logits of one pass over all tokens.",
        *(_PLAIN, _WINDOW, "decoder-experts"),
        cache=growing,
    ),
    Decoding(
        "decode-static",
        "A cache of fixed size, written in place, gives the logits of one pass over all tokens.",
        *(_PLAIN, _WINDOW, "decoder-experts"),
        cache=StaticCache,
    ),
    CompiledStep(
        "decode-static-compiled",
        "One compiled graph computes every step with a cache of fixed size, without recompilation.",
        _PLAIN,
        cache=StaticCache,
    ),
    Decoding(
        "decode-sliding", "A cache needs no more places than the window has positions.", _WINDOW, cache=sliding
    ),
    Packed(
        "decode-int8-cache",
        "Keys and values stored as int8, with one scale for each token and head, give the logits of that scheme.",
        *(_PLAIN, _WINDOW),
        cache=partial(packed, caches.int8),
        grid=caches.int8_grid,
        stored="torch.int8",
    ),
    Packed(
        "decode-float8-cache",
        "Keys and values stored as float8, with one scale for each token and head, give the logits of that scheme.",
        *(_PLAIN, _WINDOW),
        cache=partial(packed, caches.float8),
        grid=caches.float8_grid,
        stored=str(caches.FLOAT8),
        source=f"{_VLLM}/features/quantization/quantized_kvcache/",
    ),
    Decoding(
        "prefill-chunked",
        "A prompt computed in chunks gives the logits of one pass over all tokens.",
        *(_PLAIN, _WINDOW),
        cache=growing,
        chunk=CHUNK,
        source=f"{_VLLM}/configuration/optimization/",
    ),
    Decoding(
        "paged-attention",
        "Keys and values in pages, found by block tables, give the logits of one pass over all tokens.",
        *(_PLAIN, _WINDOW),
        cache=PagedCache,
        source="https://arxiv.org/abs/2309.06180",
    ),
    SharedPrefix(
        "prefix-cache",
        "Sequences that continue from the cache of a common beginning give the logits of separate passes.",
        _SHARED,
        source=f"{_VLLM}/features/automatic_prefix_caching/",
    ),
)
