"""Rows of a batch: alone as in the batch, and with low-rank adapters of their own, beside the weights or in them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.case import Evidence
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, exactly
from accelcheck.techniques.serving.decoding import KEPT, Serving
from accelcheck.workloads.base import Program
from accelcheck.workloads.decoders import ADAPTERS, AdaptedDecoder, AdaptedLinear


def alone(program: Program, tokens: Tensor) -> Tensor:
    """Computes each row alone."""
    rows = torch.cat([program.module(row) for row in tokens.unsqueeze(1)])
    program.extras[KEPT] = rows
    return rows


def passes(program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence of a pass for each row, and how many have the bits that they have in the batch."""
    rows = program.inputs[0].size(0)
    yield exactly("passes, by their embeddings", log.count("aten::embedding"), rows)
    with torch.no_grad():
        alike = (program.module(program.inputs[0]) == program.extras[KEPT]).flatten(1).all(1).sum()
    yield Evidence("rows with the bits that they have in the batch (any number)", int(alike), engaged=True)


def adapted(compute: Callable[[AdaptedLinear, Tensor], Tensor], program: Program, *inputs: Tensor) -> Any:
    """Computes each layer and its adapters by ``compute(layer, x)``."""
    kept = program.extras[KEPT] = []

    def counted(layer: AdaptedLinear, x: Tensor) -> Tensor:
        kept.append(layer)
        return compute(layer, x)

    for layer in program.module.layers:  # type: ignore[union-attr]  # an AdaptedDecoder
        layer.forward = partial(counted, layer)
    return program.module(*inputs)


def looped(layer: AdaptedLinear, x: Tensor) -> Tensor:
    """Adds the products of one adapter after the other to the rows that have it, as peft does."""
    out = functional.linear(x, layer.weight)
    for adapter in range(ADAPTERS):
        change = functional.linear(functional.linear(x, layer.down[adapter]), layer.up[adapter])
        out = out + (layer.rows == adapter).view(-1, 1, 1) * layer.scales[adapter] * change
    return out


def gathered(layer: AdaptedLinear, x: Tensor) -> Tensor:
    """Gathers the adapters of all rows, and multiplies them in two batched products, as S-LoRA does."""
    down, up = layer.down[layer.rows], layer.up[layer.rows]
    return functional.linear(x, layer.weight) + scale_of(layer) * torch.bmm(torch.bmm(x, down.mT), up.mT)


def scale_of(layer: AdaptedLinear) -> Tensor:
    """Gathers the scales of all rows."""
    return layer.scales[layer.rows]


@torch.no_grad()
def merged(program: Program, tokens: Tensor, adapters: Tensor) -> Tensor:
    """Adds one adapter after the other to the weights, computes its rows, and gives the weights back."""
    module: Any = program.module
    before = [layer.weight.clone() for layer in module.layers]
    out: dict[int, Tensor] = {}
    program.extras[KEPT] = []
    for adapter in range(ADAPTERS):
        rows = (adapters == adapter).nonzero().flatten()
        for layer in module.layers:
            layer.weight += layer.change(rows[:1])[0]
            layer.forward = partial(functional.linear, weight=layer.weight)
            program.extras[KEPT].append(layer)
        out |= dict(zip(rows.tolist(), module.decoder(tokens[rows]), strict=True))
        unmerge(module.layers, before)
    return torch.stack([out[row] for row in range(len(tokens))])


def unmerge(layers: list[AdaptedLinear], before: list[Tensor]) -> None:
    """Gives layers their weights back: a subtraction would leave rounding errors."""
    for layer, weight in zip(layers, before, strict=True):
        layer.weight.copy_(weight)
        del layer.forward


def beside(times: int, program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence that each layer was computed, or merged, as often as it should be."""
    kept, layers = program.extras[KEPT], program.module.layers
    yield exactly("calls of layers with adapters, or merges", len(kept), times * len(layers))  # type: ignore[arg-type]


_PEFT = "https://huggingface.co/docs/peft/developer_guides/lora"
_NOTE, _BOTH = "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html", "decoder decoder-experts"
_ALONE = {"family": "batching", "source": _NOTE}
_LORA, _SLORA = {"family": "lora", "kind": AdaptedDecoder}, "https://arxiv.org/abs/2311.03285"
_SAME = "give the results of weights that contain them."

TECHNIQUES: tuple[Technique, ...] = (
    Serving("batch-invariant", "A row alone has its result in the batch.", alone, passes, _BOTH, **_ALONE),
    *(
        Serving(name, f"{what} {_SAME}", serve, partial(beside, times), "decoder-adapters", **_LORA, source=source)
        for name, what, serve, times, source in (
            ("lora-unmerged", "Low-rank products beside the weights", partial(adapted, looped), 1, _PEFT),
            ("lora-merged", "Adapters added to the weights, and taken out again,", merged, ADAPTERS, _PEFT),
            ("lora-batched", "Adapters gathered for each row of a batch", partial(adapted, gathered), 1, _SLORA),
        )
    ),
)
