"""Decoding with a cache of keys and values: growing, fixed, sliding, quantized, paged; in steps, chunks, one graph."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import Compilation, graphs, recompilations, reset_compiler
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import Log, OperatorLog, exactly
from accelcheck.techniques.quantization import float8
from accelcheck.techniques.quantization.emulation import EPSILON, Quantizer, eval_copy
from accelcheck.workloads.base import Program
from accelcheck.workloads.decoders import DEPTH, PROMPT, Decoder, KeyValueCache

CHUNK, SPARE, PAGE = 5, 3, 4
"""Tokens in a chunk, beyond the last one in a cache of fixed size, and in a page."""
JUNK, KEPT, VLLM = 8.0, "serving", "https://docs.vllm.ai/en/latest"
"""Content of unused pages, as another sequence may leave it; key in `Program.extras` of what a run leaves; a source."""


class Serving(Technique):
    """Base of techniques that serve the models of `accelcheck.workloads.decoders`, whose names `workloads` has.

    ``serve(program, *inputs)`` computes the result, ``seen(program, log)`` yields evidence. Workloads run one level
    earlier. `more` has other attributes, such as `kind`, the class of the modules.
    """

    family = "kv-cache"
    source = "https://huggingface.co/docs/transformers/kv_cache"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    requires = frozenset({"decoder"})
    modes = frozenset({Mode.FORWARD})
    kind: type[nn.Module] = Decoder

    def __init__(
        self, name: str, promise: str, serve: Callable[..., Any], seen: Any, workloads: str, **more: Any
    ) -> None:
        self.name, self.promise, self.serve, self.seen = name, promise, serve, seen
        self.workloads = self.early = frozenset(workloads.split())
        vars(self).update(more)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if not isinstance(program.module, self.kind):
            raise Unsupported(unsupported(Code.NO_FEATURE, f"serves a {self.kind.__name__} alone"))
        program.call = partial(self.serve, program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: Iterable[Evidence] = self.seen(program, log)
        return seen


class QuantizedDecoding(Serving):
    """Decoding with a quantized cache, whose oracle emulates the scheme in a whole pass."""

    dtypes = ("float32",)
    grid: Callable[[], nn.Module]

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if self.grid is int8_grid else float8.WeightOnly().capability(device)

    @property
    def oracle(self) -> str:
        return f"cache-{self.grid.__name__}"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return OnGrid(module, self.grid) if isinstance(module, Decoder) else module


class CompiledDecoding(Serving, Compilation):
    """Single-token steps in one compiled graph."""

    level = 2
    capability = staticmethod(compiler_capability)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        reset_compiler()
        step = torch.compile(program.module, backend=backend_for(device), dynamic=False, fullgraph=True)
        program.call = partial(self.serve, program, step=step)


class FixedCache(KeyValueCache):
    """Cache of a fixed number of places, written in place."""

    def __init__(self, decoder: Decoder, batch: int, places: int) -> None:
        super().__init__()
        self.places = torch.arange(places, device=decoder.head.weight.device)
        empty = decoder.head.weight.new_zeros(batch, decoder.options.groups, places, DEPTH)
        self.stored = {layer: (empty.clone(), empty.clone()) for layer in range(decoder.options.blocks)}

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for buffer, new in zip(self.stored[layer], (keys, values), strict=True):
            buffer.index_copy_(2, positions, new)
        keys, values = self.stored[layer]
        return keys, values, self.places


class SlidingCache(KeyValueCache):
    """Cache of the latest places, as many as the window has."""

    def __init__(self, decoder: Decoder, batch: int, places: int) -> None:
        super().__init__()
        self.window = decoder.options.window
        if not self.window:
            raise Unsupported(unsupported(Code.NO_EFFECT, "this decoder sees all positions, not those of a window"))

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = super().update(layer, keys, values, positions)  # the first of several queries sees older places
        self.stored[layer] = (*(part[:, :, -self.window :] for part in seen[:2]), seen[2][-self.window :])
        return seen


class QuantizedCache(KeyValueCache):
    """Cache of `pack`'s integers or float8 numbers, and a scale for each key and value of a head."""

    def __init__(self, pack: Callable[[Tensor], tuple[Tensor, Tensor]], *_: Any) -> None:
        super().__init__()
        self.pack = pack

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.append(layer, *self.pack(keys), *self.pack(values), positions)
        codes, scales, other_codes, other_scales, held = self.stored[layer]
        return codes.to(scales.dtype) * scales, other_codes.to(scales.dtype) * other_scales, held


class PagedCache(KeyValueCache):
    """Cache of pages in a pool that all sequences share; block tables name the pages of each sequence, in order."""

    def __init__(self, decoder: Decoder, batch: int, places: int) -> None:
        super().__init__()
        count, weight = -(-places // PAGE), decoder.head.weight
        junk = weight.new_full((batch * count, PAGE, decoder.options.groups, DEPTH), JUNK)
        self.stored = {layer: (junk.clone(), -junk) for layer in range(decoder.options.blocks)}
        # Sequences take pages in turn, the last one first: none has neighbouring or rising pages.
        self.tables = torch.arange(batch * count, device=weight.device).flip(0).view(count, batch).t()
        self.places = torch.arange(count * PAGE, device=weight.device)

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for pool, new in zip(self.stored[layer], (keys, values), strict=True):
            pool[self.tables[:, positions // PAGE], positions % PAGE] = new.transpose(1, 2)
        keys, values = (pool[self.tables].flatten(1, 2).transpose(1, 2) for pool in self.stored[layer])
        return keys, values, self.places


class OnGrid(nn.Module, KeyValueCache):
    """FP64 emulation of `QuantizedCache`: keys and values of a whole pass, each on its grid."""

    def __init__(self, decoder: Decoder, grid: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.decoder = eval_copy(decoder)
        self.grids = nn.ModuleList([grid() for _ in range(2 * decoder.options.blocks)])

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        on = self.grids[2 * layer](keys), self.grids[2 * layer + 1](values)
        keys, values = (part[2] if isinstance(part, tuple) else part for part in on)
        return keys, values, positions

    def forward(self, tokens: Tensor) -> Any:
        return self.decoder(tokens, None, self)


def int8_scale(x: Tensor) -> tuple[Tensor, int]:
    """Computes the scale of each row, whose largest element becomes 127; the zero point is 0."""
    return (x.abs().amax(-1, keepdim=True) / 127.0).clamp(min=EPSILON), 0


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packs rows to integers from -127 to 127; returns them and the scales."""
    scale, _ = int8_scale(x)
    return torch.round(x * (1.0 / scale)).clamp(-127, 127).to(torch.int8), scale


def int8_grid() -> nn.Module:
    """Makes the emulation of `int8`."""
    return Quantizer(int8_scale, -127, 127)


def float8_grid() -> nn.Module:
    """Makes the emulation of `float8.quantize`."""
    return float8.Float8Grid(torch.float8_e4m3fn, rows=True)


def fed(model: Callable[..., Tensor], cache: KeyValueCache, tokens: Tensor) -> Tensor:
    """Computes those of ``tokens (B, n)`` that the cache lacks; returns their logits."""
    start, cache.length = cache.length, tokens.size(1)
    return model(tokens[:, start:], torch.arange(start, cache.length, device=tokens.device), cache)


def decoded(
    make: Callable[..., KeyValueCache], chunk: int, program: Program, tokens: Tensor, step: Any = None
) -> Tensor:
    """Computes tokens in chunks, or, for chunks of 1, a prefill and then single tokens, by `step` if given."""
    length = tokens.size(1)
    ends = [*range(PROMPT if chunk == 1 else chunk, length, chunk), length]
    cache: KeyValueCache = make(program.module, tokens.size(0), length + SPARE)
    program.extras[KEPT] = sizes, _ = [end - start for start, end in zip([0, *ends], ends, strict=False)], cache
    model = [step if step is not None and size == 1 else program.module for size in sizes]
    return torch.cat([fed(part, cache, tokens[:, :end]) for part, end in zip(model, ends, strict=True)], 1)


def steps(program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence that each pass took the cache further, and that it holds every position, or every visible one."""
    (sizes, cache), length = program.extras[KEPT], program.inputs[0].size(1)
    yield exactly("tokens taken by all passes", cache.length, length)
    if isinstance(log, OperatorLog):
        yield exactly("passes, by their embeddings", log.count("aten::embedding"), len(sizes))
    else:
        yield exactly("graphs compiled for all steps", graphs(), 1)
        yield exactly("recompilations", recompilations(), 0)
        yield exactly("compiled steps run", entered(log).total(), sizes.count(1))
    for layer, (keys, *_) in cache.stored.items():
        pages = isinstance(cache, PagedCache)
        rows = keys.float()[cache.tables[0]].flatten(0, 1)[:, 0] if pages else keys.float()[0, 0]
        filled = int((rows != JUNK * pages).any(-1).sum())
        yield exactly(f"keys of block {layer}, {keys.dtype}", filled, min(length, getattr(cache, "window", length)))


def shared(program: Program, tokens: Tensor) -> Tensor:
    """Computes the common beginning of all sequences once, and lets each continue from its cache."""
    common = int((tokens == tokens[:1]).all(0).long().cumprod(0).sum())
    if not common:
        raise Unsupported(unsupported(Code.NO_EFFECT, "these sequences have no common beginning"))
    cache = KeyValueCache()
    first = fed(program.module, cache, tokens[:1, :common]).expand(len(tokens), -1, -1)
    fork(cache, len(tokens))
    program.extras[KEPT] = [common, tokens.size(1) - common], cache
    return torch.cat((first, fed(program.module, cache, tokens)), 1)


def fork(cache: KeyValueCache, batch: int) -> None:
    """Gives the places of one sequence to a batch."""
    for layer, (keys, values, positions) in cache.stored.items():
        cache.stored[layer] = keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), positions


_COMPILED, _PACKED = CompiledDecoding, QuantizedDecoding
_INT8 = partial(QuantizedCache, int8)
_FLOAT8 = partial(QuantizedCache, partial(float8.quantize, dtype=torch.float8_e4m3fn, rows=True))
_SAME, _SCHEME = "gives the logits of one pass over all tokens", "gives the logits of its scheme"
_ONE, _TWO = "decoder-window", "decoder decoder-window"
_FIXED, _TIMED, _ALL = "decoder speed-decoding", f"{_TWO} speed-decoding", f"{_TWO} decoder-experts speed-decoding"
_WHOLE = {"grid": int8_grid}
_PAGES, _CHUNKS = {"source": "https://arxiv.org/abs/2309.06180"}, {"source": f"{VLLM}/configuration/optimization/"}
_NARROW = {"grid": float8_grid, "source": f"{VLLM}/features/quantization/quantized_kvcache/"}
_PREFIX = f"{VLLM}/features/automatic_prefix_caching/"

TECHNIQUES: tuple[Technique, ...] = (
    *(
        made(name, f"{what}.", partial(decoded, cache, chunk), steps, workloads, **more)
        for made, name, what, cache, chunk, workloads, more in (
            (Serving, "decode-dynamic", f"Single tokens and a growing cache {_SAME}", KeyValueCache, 1, _ALL, {}),
            (Serving, "decode-static", f"A cache of fixed size, written in place, {_SAME}", FixedCache, 1, _ALL, {}),
            (Serving, "decode-sliding", f"A cache of the window alone {_SAME}", SlidingCache, 1, _ONE, {}),
            (_COMPILED, "decode-static-compiled", f"One graph for all steps {_SAME}", FixedCache, 1, _FIXED, {}),
            (_PACKED, "decode-int8-cache", f"An int8 cache {_SCHEME}", _INT8, 1, _TIMED, _WHOLE),
            (_PACKED, "decode-float8-cache", f"A float8 cache {_SCHEME}", _FLOAT8, 1, _TIMED, _NARROW),
            (Serving, "prefill-chunked", f"A prompt in chunks {_SAME}", KeyValueCache, CHUNK, _TWO, _CHUNKS),
            (Serving, "paged-attention", f"Pages found by block tables {_SAME}", PagedCache, 1, _TIMED, _PAGES),
        )
    ),
    Serving("prefix-cache", f"A beginning computed once {_SAME}.", shared, steps, "decoder-shared", source=_PREFIX),
)
