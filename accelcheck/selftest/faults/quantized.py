"""int8 linear layers on any device: correct ones, which must pass, and common mistakes of their kernels."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.base import Change, fault, single, variant
from accelcheck.selftest.faults.plant import always, nothing
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log
from accelcheck.techniques.quantization import emulation, float8
from accelcheck.techniques.quantization.emulation import Scale
from accelcheck.techniques.quantization.int8 import DynamicInt8, Quantized, count
from accelcheck.techniques.quantization.torchao import TorchAODynamic, TorchAOWeightOnly
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

PAIR_LIMIT = 2.0**15
"""Upper end of a 16-bit register, in which x86's ``pmaddubsw`` adds two products of 8 by 8 bits."""


class Int8Linear(nn.Module):
    """A linear layer on integers that FP32 holds exactly: sums of up to 512 products of 8 by 8 bits are below 2**24.

    The weight is quantized in every call, so that it follows the parameter.

    Args:
        linear: Original layer, whose parameters are used.
        rule: Function that gives scale and zero point of an input; None to leave inputs as they are.
        low, high: Smallest and largest integer of an input.
        dim: Dimension of the weight's scales; see `symmetric_scale`.

    Attributes:
        settle: Function that computes pending operations before `rule` reads numbers of the input; a lazy device would
            otherwise compute all layers before it again for each number.
    """

    def __init__(
        self, linear: nn.Linear, rule: Callable[[Tensor], Scale] | None, low: int, high: int, dim: int | None
    ) -> None:
        super().__init__()
        self.linear, self.rule, self.low, self.high, self.dim = linear, rule, low, high, dim
        self.settle: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.packed()
        if self.rule is None:
            out = x @ self.dequantized(weight, scale).t()
        else:
            self.settle()
            step, point = self.rule(x)
            # A vector: torch_xla makes a scalar of 0 or 1 a constant of the graph, and recompiles for other values.
            step, zero = step.to(x.device), torch.tensor([float(point)]).to(x.device)
            integer = (torch.round(x * (1.0 / step)) + zero).clamp(self.low, self.high)
            out = self.scaled(self.product(integer, zero, weight), step, self.channels(scale))
        return out if self.linear.bias is None else out + self.linear.bias

    def packed(self) -> tuple[Tensor, Tensor]:
        """Integers of the weight, ``(N, K)``, and their scale, ``(N, 1)`` or ``(1,)``."""
        weight = self.linear.weight
        scale = emulation.symmetric_scale(weight.flatten() if self.dim is None else weight)
        return torch.round(weight * (1.0 / scale)).clamp(-128, 127), scale

    def product(self, x: Tensor, zero: Tensor, weight: Tensor) -> Tensor:
        """``(..., N)``: the sum over K of ``(x - zero) * weight``."""
        return (x - self.taken(zero)) @ weight.t()

    def scaled(self, product: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """A product of integers, ``(..., N)``, times the scales of input and weight."""
        return product * step * scale

    def taken(self, zero: Tensor) -> Tensor:
        """The zero point, which is subtracted from every integer of an input."""
        return zero

    def channels(self, scale: Tensor) -> Tensor:
        """The weight's scale, broadcast along an output."""
        return scale.flatten()

    def dequantized(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The weight in FP32, ``(N, K)``."""
        return weight * scale


class ZeroOff(Int8Linear):
    """Inputs are dequantized with a zero point that is one too large: 0 does not stay 0."""

    def taken(self, zero: Tensor) -> Tensor:
        return zero + 1


class PairSaturation(Int8Linear):
    """Adds products of unsigned and signed bytes in pairs, in 16 bits that saturate."""

    def product(self, x: Tensor, zero: Tensor, weight: Tensor) -> Tensor:
        # Padded to whole pairs: (..., 1, K/2, 2) with (N, K/2, 2).
        odd = x.shape[-1] % 2
        left, right = (functional.pad(t, (0, odd)).reshape(*t.shape[:-1], -1, 2) for t in (x, weight))
        pairs = (left.unsqueeze(-3) * right).sum(-1)
        total: Tensor = pairs.clamp(-PAIR_LIMIT, PAIR_LIMIT - 1).sum(-1)
        return total - zero * weight.sum(1)


class InputChannels(Int8Linear):
    """The scale of an output channel is applied along the input channels: to the K of a weight ``(N, K)``."""

    def product(self, x: Tensor, zero: Tensor, weight: Tensor) -> Tensor:
        return (x - zero) @ self.dequantized(weight, self.packed()[1]).t()

    def channels(self, scale: Tensor) -> Tensor:
        return torch.ones((), device=scale.device)

    def dequantized(self, weight: Tensor, scale: Tensor) -> Tensor:
        # With fewer output channels than inputs a kernel would read beyond the scales; this one starts over.
        places = torch.arange(weight.shape[1], device=weight.device) % len(scale)
        return weight * scale.flatten()[places]


class Reciprocal(Int8Linear):
    """Multiplies by reciprocals in place of dividing by scales, and multiplies both scales first."""

    def packed(self) -> tuple[Tensor, Tensor]:
        sizes = self.linear.weight.abs()
        inverse = 127.5 * (1.0 / (sizes.max() if self.dim is None else sizes.amax(-1, keepdim=True)))
        return torch.round(self.linear.weight * inverse).clamp(-128, 127), (1.0 / inverse).reshape(-1, 1)

    def scaled(self, product: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        return product * ((1.0 / (1.0 / step)) * scale)


def reciprocal(x: Tensor, dtype: torch.dtype, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Quantize like `float8.quantize`, multiplying by the reciprocal of the scale."""
    sizes, limit = x.float().abs(), torch.finfo(dtype).max
    inverse = limit * (
        1.0 / (sizes.amax(-1, keepdim=True) if rows else sizes.max()).clamp(min=emulation.EPSILON * limit)
    )
    return (x.float() * inverse).clamp(-limit, limit).to(dtype), 1.0 / inverse


class ReciprocalProduct(float8.Float8Linear):
    """Both operands by `reciprocal`."""

    quantize = staticmethod(reciprocal)


class ReciprocalWidened(float8.WidenedLinear):
    """The weight by `reciprocal`."""

    quantize = staticmethod(reciprocal)


class ReciprocalProducts(float8.ScaledProduct):
    """float8 products with scales by `reciprocal`."""

    layer = ReciprocalProduct


class ReciprocalWeights(float8.WeightOnly):
    """float8 weights with scales by `reciprocal`."""

    layer = ReciprocalWidened


class Int8Anywhere(Technique):
    """FP32 arithmetic on the integers of a scheme, whose oracle judges it, by layers that `make` makes.

    It needs no quantized engine, so it runs on every device.
    """

    family = "quantization"
    promise = "Linear layers multiply int8 operands; results are FP32."
    source = "https://docs.pytorch.org/docs/stable/quantization.html"
    modes = frozenset({Mode.FORWARD})
    requires, excludes = Quantized.requires, Quantized.excludes

    def __init__(self, name: str, scheme: Quantized, make: Callable[[nn.Linear], nn.Module]) -> None:
        self.name, self.scheme, self.make = name, scheme, make

    def admits(self, probe: Probe) -> bool:
        return self.scheme.admits(probe)

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return self.scheme.emulate(module, inputs)

    @property
    def oracle(self) -> str:
        return self.scheme.oracle

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        # The copy shares parameters and buffers with the original, so changes of the original reach the copy.
        shared = {id(tensor): tensor for tensor in (*program.module.parameters(), *program.module.buffers())}
        copied = copy.deepcopy(program.module, shared)
        program.call = emulation.replaced(copied, self.make)
        for layer in program.call.modules():
            if isinstance(layer, Int8Linear) and device.has("lazy"):
                layer.settle = device.synchronize

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = count(program.module, emulation.is_linear)
        call = program.call
        made = count(call, lambda m: isinstance(m, Int8Linear)) if isinstance(call, nn.Module) else 0
        yield Evidence(f"linear layers on integers = {wanted} >= 1", made, engaged=made == wanted >= 1)


def affine(steps: int) -> Callable[[nn.Linear], Int8Linear]:
    """Layers with one affine scale per input and one symmetric scale per weight, as torch.ao's dynamic ones."""
    rule = emulation.DynamicRange(steps)

    def ranged(x: Tensor) -> Scale:
        # The range depends on these two only. In torch_xla 2.9 `amin` over all dimensions returns the tensor itself.
        return rule(torch.tensor([float(x.min()), float(x.max())]))

    return lambda linear: Int8Linear(linear, ranged, 0, 255, None)


def tokens(linear: nn.Linear) -> Int8Linear:
    """A layer with one symmetric scale per token and one per channel, as torchao's dynamic ones."""
    return Int8Linear(linear, emulation.per_token, -128, 127, -1)


def weights(linear: nn.Linear) -> Int8Linear:
    """A layer with one symmetric scale per channel and unquantized inputs, as torchao's weight-only ones."""
    return Int8Linear(linear, None, 0, 0, -1)


# `fbgemm` stands for the schemes with 7-bit inputs, `qnnpack` for those with 8 bits: their formulas need no engine.
SEVEN_BITS, EIGHT_BITS = DynamicInt8("fbgemm"), DynamicInt8("qnnpack")
TOKENS, WEIGHTS = TorchAODynamic(), TorchAOWeightOnly()

DYNAMIC_7 = Int8Anywhere("int8-anywhere-7", SEVEN_BITS, affine(127))
DYNAMIC_8 = Int8Anywhere("int8-anywhere-8", EIGHT_BITS, affine(255))
TOKEN_CHANNEL = Int8Anywhere("int8-anywhere-token-channel", TOKENS, tokens)
WEIGHT_CHANNEL = Int8Anywhere("int8-anywhere-weight-channel", WEIGHTS, weights)


@always
def kernel(kind: type[Int8Linear]) -> Change:
    """Replaces every layer on integers by one of another kind."""

    def change(program: Program) -> None:
        if not isinstance(program.call, nn.Module):
            raise TypeError(f"expected a module as the program's call, got {type(program.call).__name__}")
        for layer in program.call.modules():
            if isinstance(layer, Int8Linear):
                layer.__class__ = kind

    return change


MLP, BLOCKS = single("mlp"), single("mlp-blocks")

FAULTS = (
    fault("zero-point-off-by-one")((MLP, BLOCKS), kernel(ZeroOff), number=35, technique=DYNAMIC_7),
    fault(
        "int8-pair-saturation",
        "Two products of 8 by 8 bits are added in 16 bits that saturate; twice 127 x 255 is larger.",
    )(BLOCKS, kernel(PairSaturation), number=36, technique=DYNAMIC_8),
    fault("scale-on-wrong-axis", "The weight's scales, one per output channel, are applied along its input channels.")(
        (MLP, BLOCKS), kernel(InputChannels), number=37, technique=TOKEN_CHANNEL
    ),
    fault(
        "weight-scale-on-wrong-axis",
        "A weight is dequantized with the scales of its output channels along its input channels.",
    )((MLP, BLOCKS), kernel(InputChannels), number=37, technique=WEIGHT_CHANNEL),
)

VARIANTS = (
    *(
        variant(f"correct-{technique.name}", f"The scheme {technique.oracle}, its sums exact in FP32.")(
            (MLP, BLOCKS), lambda: nothing, technique=technique
        )
        for technique in (DYNAMIC_7, DYNAMIC_8, TOKEN_CHANNEL, WEIGHT_CHANNEL)
    ),
    *(
        variant(f"reciprocal-{technique.name}", f"The scheme {technique.oracle}, with reciprocals of scales.")(
            (MLP, BLOCKS), kernel(Reciprocal), technique=technique
        )
        for technique in (DYNAMIC_7, DYNAMIC_8, TOKEN_CHANNEL, WEIGHT_CHANNEL)
    ),
    *(
        variant(f"reciprocal-{technique.name}", "float8 numbers with reciprocals of scales.")(
            (MLP, BLOCKS), lambda: nothing, technique=technique, exists=technique.capability
        )
        for technique in (
            ReciprocalWeights(),
            ReciprocalProducts("float8-scaled-mm", torch.float8_e4m3fn, rows=False),
            ReciprocalProducts("float8-scaled-mm-rowwise", torch.float8_e4m3fn, rows=True),
        )
    ),
    variant("int8-pairs-of-7-bits", "16-bit pair sums of 7 by 8 bits, which cannot saturate.")(
        (MLP, BLOCKS), kernel(PairSaturation), technique=DYNAMIC_7
    ),
)
