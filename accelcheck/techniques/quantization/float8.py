"""Linear layers with float8 operands, multiplied by ``torch._scaled_mm``, and their FP64 emulation."""

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
"""Matrix units need multiples of this number in both dimensions of a float8 weight; others are padded with zeros."""

NEEDED = (8, 9)
"""Lowest CUDA compute capability with float8 matrix units (https://docs.nvidia.com/cuda/cuda-c-programming-guide)."""

WORKLOADS = frozenset({"mlp", "mlp-blocks", "multi-head-attention", "transformer-block", "digits-mlp", "digits-vit"})
"""Workloads with inputs of several dimensions, sizes that are no multiples of `TILE`, and several layers."""


def scale_of(x: Tensor, dtype: torch.dtype, *, rows: bool) -> Tensor:
    """FP32 scale that maps the largest magnitude to a float8 dtype's maximum: per row, ``(..., 1)``, or one, ``()``."""
    sizes = x.float().abs()
    # `max`: in torch_xla 2.9, `amax` over all dimensions returns the tensor itself.
    largest = sizes.amax(-1, keepdim=True) if rows else sizes.max()
    return (largest / torch.finfo(dtype).max).clamp(min=EPSILON)


def quantize(x: Tensor, dtype: torch.dtype, *, rows: bool) -> tuple[Tensor, Tensor]:
    """The tensor's elements in float8, of its shape, and their FP32 scale."""
    scale = scale_of(x, dtype, rows=rows)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


class Float8Linear(nn.Module):
    """A linear layer that multiplies float8 operands; its output has the dtype of the input.

    Args:
        original: Its bias is shared.
        dtype: The float8 dtype of both operands.
        rows: True for one scale per token and per output channel, False for one scale per operand.
    """

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear, dtype: torch.dtype, *, rows: bool) -> None:
        super().__init__()
        self.channels, self.dtype, self.rows = original.out_features, dtype, rows
        weight, scale = quantize(original.weight.detach(), dtype, rows=rows)
        # Padded and used transposed: `torch._scaled_mm` needs a column-major second operand.
        self.register_buffer("weight", _padded(_padded(weight, 1), 0))
        self.register_buffer("scale", _padded(scale, 0, 1.0).t().contiguous() if rows else scale)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        elements, scale = quantize(x.reshape(-1, x.shape[-1]), self.dtype, rows=self.rows)
        product = torch._scaled_mm(  # noqa: SLF001 - its public name, torch.nn.functional.scaled_mm, is newer than torch 2.9
            _padded(elements, 1), self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=x.dtype
        )
        out = product[:, : self.channels].reshape(*x.shape[:-1], self.channels)
        return out.contiguous() if self.bias is None else out + self.bias


class WidenedLinear(nn.Module):
    """A linear layer that stores its weight in float8, with one scale per channel, and widens it for every product."""

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
    """Casts activations to float8 and back: FP64 in, FP64 out, of the same shape. `flips` is as in `Quantizer`."""

    def __init__(self, dtype: torch.dtype, *, rows: bool) -> None:
        super().__init__()
        self.dtype, self.rows = dtype, rows
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Without dispatch modes: the oracle must not simulate rounding errors here, since `flips` accounts for them.
        with torch.no_grad(), _disable_current_modes():
            single = x.float()
            scale = scale_of(single, self.dtype, rows=self.rows)
            if self.flips is not None:
                scale = scale * (1 + RELATIVE * (2 * torch.rand((), generator=self.flips) - 1))
            return nearest(single / scale, self.dtype, self.flips).double() * scale.double()


def emulated(layer: nn.Linear, dtype: torch.dtype, *, rows: bool, inputs: bool = True) -> Dequantized:
    """The FP64 emulation of a layer with a float8 weight and, with `inputs`, a float8 input."""
    elements, scale = quantize(layer.weight.detach().float(), dtype, rows=rows)
    return Dequantized(layer, elements.double() * scale.double(), Float8Grid(dtype, rows=rows) if inputs else None)


def tried(device: Device, dtype: torch.dtype, out: torch.dtype, *, rows: bool) -> Capability:
    """Whether the device multiplies a float8 dtype, tried with a product of ones.

    Args:
        device: Open.
        dtype: The float8 dtype of the operands.
        out: Dtype of the output.
        rows: As in `Float8Linear`.

    Raises:
        RuntimeError: The product is wrong.
    """
    layer = nn.Linear(TILE, TILE, bias=False)
    nn.init.ones_(layer.weight)
    place = device.torch_device()
    device.reset_fallbacks()
    try:
        got = Float8Linear(layer.to(place), dtype, rows=rows)(torch.ones(TILE, TILE, dtype=out).to(place)).cpu()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = f"{device.name} does not multiply {dtype} to {out}: {str(error).splitlines()[0]}"
        if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < NEEDED:
            return unavailable(Code.NO_HARDWARE, reason, "use a GPU with compute capability 8.9 or higher")
        return unsupported(Code.NO_FEATURE, reason)
    if strays := device.fallbacks():
        return unsupported(Code.NO_FEATURE, f"{device.name} falls back to the CPU for {', '.join(sorted(strays))}")
    if not bool((got == TILE).all()):
        raise RuntimeError(f"{device.name}: sums of {TILE} products of ones in {dtype}: expected {TILE}, got {got}")
    return SUPPORTED


def is_product(operator: Operator, dtype: torch.dtype) -> bool:
    """Whether an operator multiplies two operands of a float8 dtype."""
    return operator.name == "aten::_scaled_mm" and [seen for seen, _, _ in operator.inputs[:2]] == [dtype] * 2


class ScaledProduct(Replacing):
    """Replaces every linear layer by a `Float8Linear`.

    Args:
        name: As `Technique.name`.
        dtype: The float8 dtype.
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
        each = "token and channel" if rows else "tensor"
        self.promise = f"Linear layers multiply {self.format} activations and weights, with one scale per {each}."

    def capability(self, device: Device) -> Capability:
        """Whether one of FP32 and bfloat16 outputs works, by trial: kernels differ in the outputs that they support."""
        answers = [tried(device, self.stored, out, rows=self.rows) for out in (torch.float32, torch.bfloat16)]
        return next((answer for answer in answers if answer.ok), answers[0])

    @property
    def oracle(self) -> str:
        return f"{self.format}-{'token-channel' if self.rows else 'tensor'}"

    def make(self, linear: nn.Linear) -> nn.Module:
        return Float8Linear(linear, self.stored, rows=self.rows)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulated(linear, self.stored, rows=self.rows)

    def is_action(self, operator: Operator) -> bool:
        return is_product(operator, self.stored)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        out = next(program.module.parameters()).dtype
        if not (answer := tried(device, self.stored, out, rows=self.rows)).ok:
            raise Unsupported(answer)
        super().prepare(program, mode, device)


class WeightOnly(Replacing):
    """Replaces every linear layer by a `WidenedLinear`, on every device that can cast to float8."""

    name = "float8-weight-only"
    family = "precision"
    promise = "Linear layers store float8 weights (one scale per channel); activations and arithmetic stay float32."
    source = "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype"
    oracle = "float8_e4m3fn-weight-channel"
    workloads = WORKLOADS
    layer = WidenedLinear
    stored = torch.float8_e4m3fn
    action = "float8 weights widened for a product"

    def capability(self, device: Device) -> Capability:
        """Whether numbers that are exact in float8 survive a cast there and back, by trial."""
        held = torch.tensor([448.0, -0.001953125, 1.125])
        device.reset_fallbacks()
        try:
            back = held.to(device.torch_device()).to(self.stored).to(torch.float32).cpu()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            return unsupported(Code.NO_DTYPE, f"{device.name} has no {self.stored}: {str(error).splitlines()[0]}")
        if strays := device.fallbacks():
            return unsupported(Code.NO_FEATURE, f"{device.name} falls back to the CPU for {', '.join(sorted(strays))}")
        if not torch.equal(back, held):
            raise RuntimeError(
                f"{device.name}: to {self.stored} and back: expected {held.tolist()}, got {back.tolist()}"
            )
        return SUPPORTED

    def make(self, linear: nn.Linear) -> nn.Module:
        return WidenedLinear(linear, self.stored)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulated(linear, self.stored, rows=True, inputs=False)

    def is_action(self, operator: Operator) -> bool:
        return operator.name == "aten::_to_copy" and operator.takes(self.stored)


def _padded(x: Tensor, dim: int, value: float = 0.0) -> Tensor:
    """A matrix with `value` appended along a dimension, up to a multiple of `TILE`."""
    missing = -x.shape[dim] % TILE
    if not missing:
        return x.contiguous()
    if x.dtype.itemsize == 1:  # as bytes, in which 0 is 0 too, since backends cannot pad float8
        return pad(x.view(torch.uint8), (0, missing) if dim == 1 else (0, 0, 0, missing)).view(x.dtype)
    return pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing), value=value)


TECHNIQUES: tuple[Technique, ...] = (
    WeightOnly(),
    ScaledProduct("float8-scaled-mm", torch.float8_e4m3fn, rows=False),
    ScaledProduct("float8-scaled-mm-rowwise", torch.float8_e4m3fn, rows=True, level=2),
    # The float8 dtype of AMD's CDNA3, whose matrix units do not support e4m3fn.
    ScaledProduct("float8-scaled-mm-fnuz", torch.float8_e4m3fnuz, rows=False, level=2),
)
