"""A technique of your own: linear layers that compute their outputs in two parts.

Run it in this folder:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-technique=linear-in-parts --accel-workload=mlp

It prints, among other lines:

    technique        cpu
    linear-in-parts  2 pass
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from accelcheck.api import SUPPORTED, Capability, Code, Device, Evidence, Mode, Program, Technique, unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.api import Log

PARTS = 2


def in_parts(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's output, one part of its columns after the other."""
    weights = layer.weight.chunk(PARTS)
    biases = [None] * PARTS if layer.bias is None else layer.bias.chunk(PARTS)
    return torch.cat([linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)], dim=-1)


class LinearInParts(Technique):
    """Every ``nn.Linear`` of the module computes its output columns in two parts."""

    name = "linear-in-parts"
    family = "example"
    promise = "The columns of a linear layer's output can be computed one part after the other."
    source = "https://example.org/linear-in-parts"
    requires = frozenset({"linear"})  # only workloads that have nn.Linear

    def capability(self, device: Device) -> Capability:
        if device.has("lazy"):
            return unsupported(Code.NO_EFFECT, f"{device.name} compiles the parts into one product again")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        for layer in program.module.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(in_parts, layer)  # type: ignore[method-assign]  # on this instance alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        layers = sum(isinstance(layer, nn.Linear) for layer in program.module.modules())
        products = log.count("aten::(addmm|mm)")
        yield Evidence(f"matrix products >= {PARTS * layers}", products, engaged=products >= PARTS * layers)


def pytest_accel_techniques() -> list[Technique]:
    """Register the technique."""
    return [LinearInParts()]
