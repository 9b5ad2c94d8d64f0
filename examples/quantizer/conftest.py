"""A quantizer of your own: linear layers with int8 weights. docs/quantizer.md builds it step by step.

Run it in this folder:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-technique=int8-weights --accel-workload=mlp --accel-workload=digits-mlp --accel-level=2

It prints, among other lines:

    technique     cpu
    int8-weights  2 pass
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from accelcheck.api import Device, Evidence, Mode, Program, Technique, operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.api import Log

SMALLEST = 1e-30  # of a scale, for channels that are zero


class Int8Linear(nn.Module):
    """A linear layer whose weights are int8, with one scale for each output channel."""

    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=SMALLEST)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.squeeze(1))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight.to(x.dtype)) * self.scale
        return out if self.bias is None else out + self.bias


def replaced(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The module with ``make(layer)`` in place of each ``nn.Linear``; a layer with two names gets one replacement."""
    layers = {name: part for name, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Linear}
    made = {layer: make(layer) for layer in set(layers.values())}
    for name in layers.keys() - {""}:
        module.set_submodule(name, made[layers[name]])
    return made[layers[""]] if "" in layers else module


class Int8Weights(Technique):
    """Every ``nn.Linear`` has int8 weights; activations and arithmetic stay in floating point."""

    name = "int8-weights"
    family = "example"
    promise = "Linear layers store int8 weights, with one scale for each output channel."
    source = "https://example.org/int8-weights"
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    requires = frozenset({"linear"})
    excludes = frozenset({"branching"})
    oracle = "example-int8-weights"
    bakes = True

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        module = copy.deepcopy(module)
        for layer in module.modules():
            if type(layer) is nn.Linear:
                weight = layer.weight.detach().float()  # the scheme's integers come from FP32 arithmetic
                scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=SMALLEST)
                layer.weight = nn.Parameter((weight / scale).round().double() * scale.double())
        return module

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.call = replaced(copy.deepcopy(program.module), Int8Linear)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        assert isinstance(program.call, nn.Module)
        layers = [part for part in program.call.modules() if isinstance(part, Int8Linear)]
        yield Evidence("quantized layers >= 1", len(layers), engaged=len(layers) >= 1)
        stored = {str(part.weight.dtype) for part in layers}
        yield Evidence("stored weights are int8", ", ".join(stored), engaged=stored == {"torch.int8"})
        widened = operators(log).having(lambda one: one.name == "aten::_to_copy" and one.takes(torch.int8))
        yield Evidence(f"int8 weights that a product took >= {len(layers)}", widened, engaged=widened >= len(layers))


def pytest_accel_techniques() -> list[Technique]:
    """Register the technique."""
    return [Int8Weights()]
