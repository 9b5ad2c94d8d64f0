"""Quantization-aware training and conversion by torchao, and the FP64 emulation of such a training."""

import copy
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from accelcheck.core.capability import Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, exactly, operators
from accelcheck.techniques.quantization.emulation import RELATIVE, is_linear, replaced, rounded, symmetric_scale
from accelcheck.techniques.quantization.int8 import Quantized, count
from accelcheck.techniques.quantization.torchao import torchao_capability
from accelcheck.workloads.base import Program

LOW, HIGH = -128, 127
UNIT = 2.0**-24
"""Unit roundoff of FP32."""
_WORKLOADS = frozenset({"mlp-blocks", "transformer-block", "train-mlp", "train-transformer", "digits-mlp-training"})
_LAYERS = "linear layers"


class _Straight(torch.autograd.Function):
    """Replaces `x` by `value`; the gradient of `x` is passed where `inside` is True, and is 0 elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return value.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None


class FakeQuantizer(nn.Module):
    """Quantizes rows to int8 and back, FP64 in and out. Gradients pass where nothing is clipped.

    The rules of torchao's ``IntxFakeQuantizer``: an affine range per token for activations, a symmetric one per channel
    for weights. `flips` works as in `accelcheck.techniques.quantization.emulation.Quantizer`, also for zero points.
    """

    def __init__(self, *, symmetric: bool) -> None:
        super().__init__()
        self.symmetric = symmetric
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), disable_current_modes():
            single = x.float()
            scale, zero = self._range(single)
            integer = rounded(single * (1.0 / scale), single, self.flips) + zero
            value = (integer.clamp(LOW, HIGH) - zero).double() * scale.double()
            inside = (integer >= LOW) & (integer <= HIGH)
        out: Tensor = _Straight.apply(x, value, inside)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def _range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.symmetric:
            scale = symmetric_scale(x)
            zero = torch.zeros_like(scale)
        else:
            low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
            scale = ((high - low) / (HIGH - LOW)).clamp(min=torch.finfo(torch.float32).smallest_normal)
            zero = (LOW - rounded(low / scale, low, self.flips)).clamp(LOW, HIGH)
        if self.flips is not None:
            scale = scale * (1 + RELATIVE * (2 * torch.rand((), generator=self.flips) - 1))
        return scale, zero


class FakeQuantized(nn.Module):
    """Linear layer with fake-quantized operands, in FP64, with the parameters of the original."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.inputs, self.weights = FakeQuantizer(symmetric=False), FakeQuantizer(symmetric=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inputs(x), self.weights(self.weight), self.bias)


class Qat(Technique):
    """Trains with torchao's fake-quantized layers. `evidence` converts a copy and compares its layers one by one."""

    name = "int8-qat"
    family = "quantization"
    requires = frozenset({"linear"})
    workloads = _WORKLOADS
    promise = (
        "Training uses int8 activations (one range per token) and weights (one scale per channel); conversion keeps "
        "both."
    )
    source = "https://docs.pytorch.org/ao/stable/workflows/qat.html"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.LEARNING})
    level = 2
    early = frozenset({"transformer-block"})
    oracle = "int8-fake-token-channel"
    admits = Quantized.admits
    differentiates_twice = False

    def capability(self, device: Device) -> Capability:
        return torchao_capability("Int8DynamicActivationIntxWeightConfig")

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return replaced(copy.deepcopy(module), FakeQuantized)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.extras[_LAYERS] = count(program.module, is_linear)
        _quantize(program.module, "prepare")

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = program.extras[_LAYERS]
        kind = importlib.import_module("torchao.quantization.qat.linear").FakeQuantizedLinear
        parts = program.module.named_modules(remove_duplicate=False)
        layers = {name: part for name, part in parts if isinstance(part, kind)}
        steps = 1 if mode is Mode.BACKWARD else program.steps
        roundings = operators(log).count("aten::round")
        yield Evidence(f"fake-quantized linear layers = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        least = 2 * wanted * steps
        yield Evidence(f"operands rounded >= {least}", roundings, engaged=roundings >= least >= 1)
        converted = copy.deepcopy(program.module).eval()
        _quantize(converted, "convert")
        yield from _round_trip(layers, converted, _inputs(program, layers))


def _round_trip(layers: dict[str, Any], converted: nn.Module, inputs: dict[str, Tensor]) -> Iterator[Evidence]:
    """Yields evidence that converted layers have the weights and outputs of the fake-quantized ones on equal inputs."""
    parts = {name: part for name, part in converted.named_modules() if name in layers and is_linear(part)}
    kinds = sum(
        type(getattr(part.weight, "data", None)).__name__ == "IntxUnpackedToInt8Tensor" for part in parts.values()
    )
    yield exactly("layers converted to int8 weights", kinds, len(layers))
    changed, worst = 0, 0.0
    with torch.no_grad():
        for name, layer in layers.items():
            part: Any = parts.get(name)
            if part is None:
                continue
            weight = layer.weight_fake_quantizer(layer.weight)
            changed += int((part.weight.dequantize() != weight).sum())
            given = layer.activation_fake_quantizer(inputs[name])
            # Two sums of K products and a bias, in any order, differ by at most 2 (K + 1) u times the magnitudes' sum.
            sizes = F.linear(given.abs(), weight.abs(), None if layer.bias is None else layer.bias.abs())
            most = 2 * (weight.shape[1] + 1) * UNIT * sizes
            apart = (part(inputs[name]) - layer(inputs[name])).abs()
            worst = max(worst, float((apart / most.clamp(min=torch.finfo(torch.float32).tiny)).max()))
    yield Evidence("elements of weights that conversion changed = 0", changed, engaged=changed == 0 < len(parts))
    claim = "difference of converted layers' outputs, relative to the rounding bound of their sums <= 1"
    yield Evidence(claim, round(worst, 4), engaged=worst <= 1.0 and bool(parts))


def _inputs(program: Program, layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Records the input of each layer, by name, in evaluation mode and with the present parameters."""
    seen: dict[str, Tensor] = {}

    def watch(name: str, layer: nn.Module) -> Any:
        return layer.register_forward_pre_hook(lambda _, inputs: seen.__setitem__(name, inputs[0]))

    hooks = [watch(name, layer) for name, layer in layers.items()]
    training = program.module.training
    try:
        with torch.no_grad():
            program.module.eval()(*program.inputs)
    finally:
        program.module.train(training)
        for hook in hooks:
            hook.remove()
    return seen


def _quantize(module: nn.Module, step: str) -> None:
    tools: Any = importlib.import_module("torchao.quantization")
    qat: Any = importlib.import_module("torchao.quantization.qat")
    base = tools.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=tools.PerAxis(0))
    config = qat.QATConfig(base, step=step)
    every = step == "convert"  # torchao's own layers are of a subclass
    tools.quantize_(module, config, filter_fn=lambda m, _: is_linear(m) or (every and isinstance(m, nn.Linear)))


TECHNIQUES: tuple[Technique, ...] = (Qat(),)
