"""Linear layers on float8 operands by ``torch._scaled_mm``, and what they compute, in FP64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import _disable_current_modes

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.quantization.emulation import EPSILON, RELATIVE, Dequantized, nearest
from accelcheck.techniques.quantization.int8 import Replacing

if TYPE_CHECKING:
    from accelcheck.core.case import Mode
    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Operator
    from accelcheck.workloads.base import Program

TILE = 16
"""Both dimensions of a float8 weight are multiples of it where matrix units multiply; others are padded with zeros."""

NEEDED = (8, 9)
"""Least CUDA compute capability with float8 matrix units (https://docs.nvidia.com/cuda/cuda-c-programming-guide)."""

WORKLOADS = frozenset({"mlp", "mlp-blocks", "multi-head-attention", "transformer-block", "digits-mlp", "digits-vit"})
"""Enough shapes: several dimensions, sizes that are no multiples of `TILE`, activations of several layers."""


def scale_of(x: Tensor, dtype: torch.dtype, *, rows: bool) -> Tensor:
    """FP32 scale by which a tensor fills the range of a float8 dtype: of each row ``(..., 1)``, or of all ``()``."""
    sizes = x.float().abs()
    # `max`: torch_xla 2.9 has no `amax` over all dimensions, and gives the tensor back.
    largest = sizes.amax(-1, keepdim=True) if rows else sizes.max()
    return (largest / torch.finfo(dtype).max).clamp(min=EPSILON)


def quantize(x: Tensor, dtype: torch.dtype, *, rows: bool) -> tuple[Tensor, Tensor]:
    """float8 elements of a tensor's shape, and their scale."""
    scale = scale_of(x, dtype, rows=rows)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


class Float8Linear(nn.Module):
    """A linear layer that multiplies float8 operands, both with scales of their own, and gives the input's dtype.

    Args:
        original: Its bias is used.
        dtype: A float8 one, of both operands.
        rows: Whether each token and each output channel has its own scale; else each operand has one.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear, dtype: torch.dtype, *, rows: bool) -> None:
        super().__init__()
        self.channels, self.dtype, self.rows = original.out_features, dtype, rows
        weight, scale = quantize(original.weight.detach(), dtype, rows=rows)
        # Transposed views of padded memory: `torch._scaled_mm` wants the second operand column-major.
        self.register_buffer("weight", _padded(_padded(weight, 1), 0))
        self.register_buffer("scale", _padded(scale, 0, 1.0).t().contiguous() if rows else scale)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        elements, scale = quantize(x.reshape(-1, x.shape[-1]), self.dtype, rows=self.rows)
        product = torch._scaled_mm(  # noqa: SLF001 - torch.nn.functional.scaled_mm calls it, and is newer than torch 2.9
            _padded(elements, 1), self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype
        )
        out = product[:, : self.channels].reshape(*x.shape[:-1], self.channels)
        return out.contiguous() if self.bias is None else out + self.bias


class WidenedLinear(nn.Module):
    """A linear layer that keeps its weight in float8, with a scale a channel, and widens it for every product."""

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight, scale = quantize(original.weight.detach(), dtype, rows=True)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Float8Grid(nn.Module):
    """Activations to float8 and back: FP64 in, FP64 out, of the same shape. `flips` is as `Quantizer.flips`."""

    def __init__(self, dtype: torch.dtype, *, rows: bool) -> None:
        super().__init__()
        self.dtype, self.rows = dtype, rows
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Whether an element lies near a tie decides; rounding errors of the decision itself are `flips`.
        with torch.no_grad(), _disable_current_modes():
            single = x.float()
            scale = scale_of(single, self.dtype, rows=self.rows)
            if self.flips is not None:
                scale = scale * (1 + RELATIVE * (2 * torch.rand((), generator=self.flips) - 1))
            return nearest(single / scale, self.dtype, self.flips).double() * scale.double()


def emulated(layer: nn.Linear, dtype: torch.dtype, *, rows: bool, inputs: bool = True) -> Dequantized:
    """What a float8 layer computes, in FP64; with `inputs`, its input is float8 too."""
    elements, scale = quantize(layer.weight.detach().float(), dtype, rows=rows)
    return Dequantized(layer, elements.double() * scale.double(), Float8Grid(dtype, rows=rows) if inputs else None)


def tried(device: Device, dtype: torch.dtype, out: torch.dtype, *, rows: bool) -> Capability:
    """Whether a product of ones of a float8 dtype, with a dtype of outputs, comes out right on the device itself."""
    layer = nn.Linear(TILE, TILE, bias=False)
    nn.init.ones_(layer.weight)
    place = device.torch_device()
    device.reset_fallbacks()
    try:
        got = Float8Linear(layer.to(place), dtype, rows=rows)(torch.ones(TILE, TILE, dtype=out).to(place)).cpu()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = f"{device.name} multiplies no {dtype} to {out}: {str(error).splitlines()[0]}"
        if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < NEEDED:
            return unavailable(Code.NO_HARDWARE, reason, "use a GPU of compute capability 8.9 or more")
        return unsupported(Code.NO_FEATURE, reason)
    if strays := device.fallbacks():
        return unsupported(Code.NO_FEATURE, f"{device.name} hands {', '.join(sorted(strays))} to the CPU")
    if not bool((got == TILE).all()):
        raise RuntimeError(f"{device.name}: sums of {TILE} products of ones in {dtype}: expected {TILE}, got {got}")
    return SUPPORTED


def is_product(operator: Operator, dtype: torch.dtype) -> bool:
    """Whether an operator multiplies two operands of a float8 dtype."""
    return operator.name == "aten::_scaled_mm" and [seen for seen, _, _ in operator.inputs[:2]] == [dtype] * 2


class ScaledProduct(Replacing):
    """`Float8Linear` in place of every linear layer.

    Args:
        name: Its word.
        dtype: A float8 one.
        rows: As in `Float8Linear`.
        level: As `Technique.level`.
    """

    family = "precision"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html"
    dtypes = ("float32", "bfloat16")
    workloads = WORKLOADS
    layer = Float8Linear

    def __init__(self, name: str, dtype: torch.dtype, *, rows: bool, level: int = 1) -> None:
        self.name, self.stored, self.rows, self.level = name, dtype, rows, level
        self.format = str(dtype).removeprefix("torch.")
        self.action = f"{self.format} products (aten::_scaled_mm)"
        each = "a token and a channel" if rows else "a tensor"
        self.promise = f"Linear layers multiply {self.format} activations and weights, with a scale {each}."

    def capability(self, device: Device) -> Capability:
        """By trial, in FP32 and in bfloat16 outputs: kernels differ in what they give."""
        answers = [tried(device, self.stored, out, rows=self.rows) for out in (torch.float32, torch.bfloat16)]
        return next((answer for answer in answers if answer.ok), answers[0])

    @property
    def oracle(self) -> str:
        return f"{self.format}-{'token-channel' if self.rows else 'tensor'}"

    def make(self, linear: nn.Linear) -> nn.Module:
        return Float8Linear(linear, self.stored, rows=self.rows)

    def exactly(self, linear: nn.Linear) -> nn.Module:
        return emulated(linear, self.stored, rows=self.rows)

    def taken(self, operator: Operator) -> bool:
        return is_product(operator, self.stored)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        out = next(program.module.parameters()).dtype
        if not (answer := tried(device, self.stored, out, rows=self.rows)).ok:
            raise Unsupported(answer)
        super().prepare(program, mode, device)


class WeightOnly(Replacing):
    """`WidenedLinear` in place of every linear layer: for every device that casts."""

    name = "float8-weight-only"
    family = "precision"
    promise = "Linear layers keep float8 weights (a scale a channel); activations and arithmetic stay float32."
    source = "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype"
    oracle = "float8_e4m3fn-weight-channel"
    workloads = WORKLOADS
    layer = WidenedLinear
    stored = torch.float8_e4m3fn
    action = "float8 weights widened for a product"

    def capability(self, device: Device) -> Capability:
        """By trial: numbers that float8 holds, there and back."""
        held = torch.tensor([448.0, -0.001953125, 1.125])
        device.reset_fallbacks()
        try:
            back = held.to(device.torch_device()).to(self.stored).to(torch.float32).cpu()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return unsupported(Code.NO_DTYPE, f"{device.name} has no {self.stored}: {str(error).splitlines()[0]}")
        if strays := device.fallbacks():
            return unsupported(Code.NO_FEATURE, f"{device.name} hands {', '.join(sorted(strays))} to the CPU")
        if not torch.equal(back, held):
            raise RuntimeError(
                f"{device.name}: to {self.stored} and back: expected {held.tolist()}, got {back.tolist()}"
            )
        return SUPPORTED

    def make(self, linear: nn.Linear) -> nn.Module:
        return WidenedLinear(linear, self.stored)

    def exactly(self, linear: nn.Linear) -> nn.Module:
        return emulated(linear, self.stored, rows=True, inputs=False)

    def taken(self, operator: Operator) -> bool:
        return operator.name == "aten::_to_copy" and operator.takes(self.stored)


def _padded(x: Tensor, dim: int, value: float = 0.0) -> Tensor:
    """A matrix with a dimension filled up to a multiple of `TILE`."""
    missing = -x.shape[dim] % TILE
    if not missing:
        return x.contiguous()
    if x.dtype.itemsize == 1:  # as bytes, since backends pad no float8: 0 is 0
        return pad(x.view(torch.uint8), (0, missing) if dim == 1 else (0, 0, 0, missing)).view(x.dtype)
    return pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing), value=value)


TECHNIQUES: tuple[Technique, ...] = (
    WeightOnly(),
    ScaledProduct("float8-scaled-mm", torch.float8_e4m3fn, rows=False),
    ScaledProduct("float8-scaled-mm-rowwise", torch.float8_e4m3fn, rows=True, level=2),
    # The type of AMD's CDNA3, whose matrix units do not know e4m3fn.
    ScaledProduct("float8-scaled-mm-fnuz", torch.float8_e4m3fnuz, rows=False, level=2),
)
