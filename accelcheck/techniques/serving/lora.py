"""Low-rank adapters of a decoder: beside its weights, merged into them, and several in one batch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.observe import exactly
from accelcheck.techniques.serving.decoding import Serving, only
from accelcheck.workloads.decoders import Adapted, AdaptedDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_CALLS, _LEFT = "adapter calls", "weights left changed"
"""Keys in `Program.extras`: layers or merges computed in a run, and weights that a merge did not give back."""


class Adapters(Serving):
    """Adapters of the rows of a batch.

    Attributes:
        layer: ``layer(layer, x)`` computes a layer with adapters; None to merge one adapter after the other.
    """

    family = "lora"
    layer: Callable[[Adapted, Tensor], Tensor] | None = None

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        module: AdaptedDecoder = only(program, AdaptedDecoder)
        program.extras.update({_CALLS: 0, _LEFT: 0})
        program.resets.append(lambda: program.extras.update({_CALLS: 0, _LEFT: 0}))

        def counted(layer: Adapted, x: Tensor) -> Tensor:
            program.extras[_CALLS] += 1
            assert self.layer is not None
            return self.layer(layer, x)

        if self.layer is None:
            program.call = partial(merged, program, module)
            return
        for layer in module.layers():
            layer.forward = partial(counted, layer)  # type: ignore[method-assign]  # on this instance alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        layers, used = len(program.module.layers()), len(set(program.inputs[1].tolist()))  # type: ignore[operator]
        if self.layer is None:
            yield exactly("weights merged with an adapter", program.extras[_CALLS], layers * used)
            yield exactly("weights that differ after the merges", program.extras[_LEFT], 0)
        else:
            yield exactly("layers computed beside their adapters", program.extras[_CALLS], layers)


def looped(layer: Adapted, x: Tensor) -> Tensor:
    """Adds the products of one adapter after the other to those rows that have it, as peft does."""
    out = functional.linear(x, layer.weight)
    for adapter in range(len(layer.scales)):
        change = functional.linear(functional.linear(x, layer.down[adapter]), layer.up[adapter])
        out = out + (layer.rows == adapter).view(-1, 1, 1) * layer.scales[adapter] * change
    return out


def gathered(layer: Adapted, x: Tensor) -> Tensor:
    """Gathers each row's adapter, and multiplies all in two batched products, as S-LoRA does."""
    down, up, scales = (part[layer.rows] for part in (layer.down, layer.up, layer.scales))
    change = torch.bmm(torch.bmm(x, down.transpose(1, 2)), up.transpose(1, 2))
    return functional.linear(x, layer.weight) + scales.view(-1, 1, 1) * change


@torch.no_grad()
def merged(program: Program, module: AdaptedDecoder, tokens: Tensor, adapters: Tensor) -> Tensor:
    """Adds one adapter after the other to the weights, computes its rows, and gives the weights back."""
    layers = module.layers()
    before = [layer.weight.clone() for layer in layers]
    rows: dict[int, Tensor] = {}
    for adapter in sorted(set(adapters.tolist())):
        for layer in layers:
            layer.weight += layer.change(adapters.new_tensor(adapter))
            layer.forward = partial(functional.linear, weight=layer.weight)  # type: ignore[method-assign]
            program.extras[_CALLS] += 1
        places = (adapters == adapter).nonzero().flatten()
        rows |= dict(zip(places.tolist(), module.decoder(tokens[places]), strict=True))
        unmerged(layers, before)
    for layer in layers:
        del layer.forward  # what is left is the class's own
    program.extras[_LEFT] += sum(not torch.equal(layer.weight, was) for layer, was in zip(layers, before, strict=True))
    return torch.stack([rows[row] for row in range(len(tokens))])


def unmerged(layers: list[Adapted], before: list[Tensor]) -> None:
    """Gives layers their weights back: subtraction would leave rounding errors."""
    for layer, weight in zip(layers, before, strict=True):
        layer.weight.copy_(weight)


_ROWS = "decoder-adapters"

TECHNIQUES: tuple[Technique, ...] = (
    Adapters(
        "lora-unmerged",
        "Low-rank products beside the weights equal a weight that contains them.",
        _ROWS,
        source="https://huggingface.co/docs/peft/developer_guides/lora",
        layer=looped,
    ),
    Adapters(
        "lora-merged",
        "An adapter merged into the weights gives their results, and the weights are as before afterwards.",
        _ROWS,
        source="https://huggingface.co/docs/peft/developer_guides/lora",
    ),
    Adapters(
        "lora-batched",
        "Rows of one batch have their own adapters.",
        _ROWS,
        source="https://arxiv.org/abs/2311.03285",
        layer=gathered,
    ),
)
