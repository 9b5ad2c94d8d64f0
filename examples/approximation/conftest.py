"""Techniques that approximate by design, each with the oracle of its own scheme.

Run them in this folder on a model of yours, or on a built-in one:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-technique='*-approximate' --accel-workload=model --accel-model=model.py

It prints, among other lines:

    technique           cpu
    bf16x3-approximate  1 pass
    gelu-approximate    2 pass
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.api import SUPPORTED, Capability, Device, Evidence, Mode, Program, Technique

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.api import Log


class TanhGelu(nn.Module):
    """GELU by its tanh formula, of a tensor of any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")


class SplitLinear(nn.Module):
    """A linear layer that multiplies bfloat16 parts of its operands: high x high, high x low and low x high.

    Args:
        layer: The layer with the weights; of any dtype, in which the parts are multiplied and added.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        (high, low), (upper, lower) = _parts(x), _parts(self.weight)
        products = (functional.linear(a, b) for a, b in ((high, upper), (high, lower), (low, upper)))
        total = sum(products, torch.zeros((), dtype=x.dtype))
        return total if self.bias is None else total + self.bias


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.bfloat16().to(x.dtype)
    return high, (x - high).bfloat16().to(x.dtype)


class Approximation(Technique):
    """Replaces layers of one class by others that compute something else by design."""

    family = "example"
    source = "https://example.org/approximation"
    layer: type[nn.Module]
    other: type[nn.Module]

    def capability(self, device: Device) -> Capability:
        return SUPPORTED

    def replace(self, module: nn.Module) -> nn.Module:
        """Replace the layers in place."""
        for name, child in [*module.named_children()]:
            setattr(module, name, self.made(child) if type(child) is self.layer else self.replace(child))
        return module

    def made(self, layer: nn.Module) -> nn.Module:
        """Layer that takes the place of another one."""
        return self.other()

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.replace(program.module)

    # The oracle: the same layers in FP64 on a copy. Budgets are then those of FP32 rounding around the scheme, and the
    # table shows its distance from the FP32 model beside that.
    def emulate(self, module: nn.Module, inputs: tuple[object, ...]) -> nn.Module:
        return self.replace(copy.deepcopy(module).double())

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        layers = sum(type(part) is self.other for part in program.module.modules())
        yield Evidence(f"{self.other.__name__} layers >= 1", layers, engaged=layers >= 1)


class ApproximateGelu(Approximation):
    """``nn.GELU`` by its tanh formula."""

    name = "gelu-approximate"
    promise = "GELU is computed by its tanh formula."
    oracle = "gelu-tanh"
    layer, other = nn.GELU, TanhGelu


class SplitProducts(Approximation):
    """Linear layers as three products of bfloat16 parts. Forward only, since casts round gradients to bfloat16."""

    name = "bf16x3-approximate"
    promise = "A product of FP32 operands is the sum of three products of their bfloat16 parts."
    oracle = "bf16x3"
    modes = frozenset({Mode.FORWARD})
    layer, other = nn.Linear, SplitLinear

    def made(self, layer: nn.Module) -> nn.Module:
        assert isinstance(layer, nn.Linear)
        return SplitLinear(layer)


def pytest_accel_techniques() -> list[Technique]:
    """Register the techniques."""
    return [ApproximateGelu(), SplitProducts()]
