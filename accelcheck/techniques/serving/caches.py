"""Caches of keys and values: of fixed size, of a sliding window, quantized, and in pages with block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from accelcheck.techniques.quantization.emulation import EPSILON, Quantizer, eval_copy
from accelcheck.techniques.quantization.float8 import Float8Grid, quantize
from accelcheck.workloads.decoders import Cache, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = 4
"""Number of tokens of a page."""
JUNK = 8.0
"""Content of pages before their first use, as another sequence may leave it."""
FLOAT8 = torch.float8_e4m3fn


class StaticCache(Cache):
    """Cache of a fixed number of places, written in place: its shapes and addresses are the same in every step."""

    def __init__(self, decoder: Decoder, batch: int, places: int) -> None:
        super().__init__()
        options, weight = decoder.options, decoder.head.weight
        self.places = torch.arange(places, device=weight.device)
        shape = (batch, options.groups, places, options.depth)
        self.stored = {layer: (weight.new_zeros(shape), weight.new_zeros(shape)) for layer in range(options.blocks)}

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for buffer, new in zip(self.stored[layer], (keys, values), strict=True):
            buffer.index_copy_(2, positions, new)
        return (*self.stored[layer], self.places)


class SlidingCache(Cache):
    """Cache that keeps only the latest places, as many as a window has."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The first of several new queries also sees places that the last one does not.
        seen = super().update(layer, keys, values, positions)
        keys, values, positions = (part[..., -self.window :, :] if part.dim() > 2 else part for part in seen)
        self.stored[layer] = keys, values, positions[..., -self.window :]
        return seen


class QuantizedCache(Cache):
    """Cache of integers or float8 numbers, with one FP32 scale for each key and value of a head."""

    def __init__(self, pack: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.pack = pack

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._append(layer, *self.pack(keys), *self.pack(values), positions)
        codes, scales, *others, held = self.stored[layer]
        wide, narrow = (codes.to(scales.dtype) * scales, others[0].to(scales.dtype) * others[1])
        return wide.to(keys.dtype), narrow.to(keys.dtype), held


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packs rows to integers from -127 to 127; returns the integers and the scales."""
    scale, _ = int8_scale(x.float())
    return torch.round(x.float() * (1.0 / scale)).clamp(-127, 127).to(torch.int8), scale


def int8_scale(x: Tensor) -> tuple[Tensor, int]:
    """Computes the scale of each row, whose largest element becomes 127; the zero point is 0."""
    return (x.abs().amax(-1, keepdim=True) / 127.0).clamp(min=EPSILON), 0


def float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Packs rows to `FLOAT8`; returns the elements and the scales."""
    return quantize(x, FLOAT8, rows=True)


class PagedCache(Cache):
    """Cache of pages in a pool that all sequences share; block tables name the pages of each sequence, in order."""

    def __init__(self, decoder: Decoder, batch: int, places: int) -> None:
        super().__init__()
        options, weight = decoder.options, decoder.head.weight
        count = -(-places // PAGE)
        pages = batch * count
        shape = (pages, PAGE, options.groups, options.depth)
        self.stored = {
            layer: (torch.full_like(weight.new_empty(shape), JUNK), torch.full_like(weight.new_empty(shape), -JUNK))
            for layer in range(options.blocks)
        }
        # Sequences get pages in turn, the last page first, so that no sequence has neighbouring or rising pages.
        self.tables = torch.arange(pages - 1, -1, -1, device=weight.device).view(count, batch).t().contiguous()
        self.places = torch.arange(count * PAGE, device=weight.device)

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pages, slots = self.tables[:, positions // PAGE], positions % PAGE
        seen = []
        for pool, new in zip(self.stored[layer], (keys, values), strict=True):
            pool[pages, slots] = new.transpose(1, 2)
            seen.append(pool[self.tables].flatten(1, 2).transpose(1, 2))
        return seen[0], seen[1], self.places


class _Grids(Cache):
    """Cache of a single whole pass in FP64, whose keys and values have been on a grid."""

    def __init__(self, grids: nn.ModuleList) -> None:
        super().__init__()
        self.grids = grids

    def update(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        on = [grid(part) for grid, part in zip(self.grids[2 * layer : 2 * layer + 2], (keys, values), strict=True)]
        keys, values = (part[2] if isinstance(part, tuple) else part for part in on)
        return keys, values, positions


class EmulatedCache(nn.Module):
    """FP64 emulation of a decoder whose cache is quantized, by whole passes."""

    def __init__(self, decoder: nn.Module, grid: Callable[[], nn.Module], blocks: int) -> None:
        super().__init__()
        self.decoder = eval_copy(decoder)
        self.grids = nn.ModuleList([grid() for _ in range(2 * blocks)])

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(tokens, None, _Grids(self.grids))
        return out


def int8_grid() -> nn.Module:
    """Makes the emulation of `int8`."""
    return Quantizer(int8_scale, -127, 127)


def float8_grid() -> nn.Module:
    """Makes the emulation of `float8`."""
    return Float8Grid(FLOAT8, rows=True)
