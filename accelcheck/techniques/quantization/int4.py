"""Linear layers with 4-bit weights, packed two per byte, with one scale per group; and their FP64 emulation."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.quantization.emulation import Dequantized, RoundedSides
from accelcheck.techniques.quantization.int8 import Replacing

LEVELS = 15
"""Number of steps from the smallest 4-bit integer to the largest."""
MIDDLE = 8
"""Integer that the kernel subtracts from each integer of 0 to `LEVELS`."""
GROUP = 32
"""Number of weights that share a scale: the smallest group that the kernel supports."""
SMALLEST = 1e-6
"""Smallest scale, as in torchao's rule for this kernel."""
TILE = 16
"""Divisor of the kernel's numbers of output channels; other weights are padded with zeros."""
WORKLOADS = frozenset({"mlp", "mlp-blocks", "multi-head-attention", "transformer-block", "digits-mlp", "digits-vit"})
"""Workloads with widths that are and are not multiples of a group, inputs of several dimensions, and several layers."""


def quantize(weight: Tensor, side: RoundedSides | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes an FP32 weight ``(N, K)`` to integers of its shape, scales and zero points, ``(N, K / GROUP)`` each.

    With a `side`, scales and positions err to it, in FP64. The rule is torchao's ``_choose_qparams_affine_tinygemm``:
    the integers span the range of their group, and the zero point is the real number that the integer `MIDDLE` means.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp(min=SMALLEST)
    position = (groups - low) / scale
    if side is not None:
        position, scale = side.position(position, groups), side.scale(scale)
    integers = torch.round(position).clamp(0, LEVELS)
    return integers.reshape(weight.shape), scale.squeeze(-1), (low + MIDDLE * scale).squeeze(-1)


def packed(original: nn.Linear) -> Dequantized:
    """Makes the FP64 emulation of `KernelLinear` and `NibbleLinear`."""

    def held(weight: Tensor, side: RoundedSides) -> Tensor:
        integers, scale, zero = (part.double() for part in quantize(_padded(weight, GROUP), side))
        whole = (integers - MIDDLE) * scale.repeat_interleave(GROUP, 1) + zero.repeat_interleave(GROUP, 1)
        return whole[:, : weight.shape[1]]

    return Dequantized(original, held)


def unpacked(original: nn.Linear, group: int) -> Dequantized:
    """Makes the FP64 emulation of a layer with torchao's asymmetric int4 weight, whose ranges always include 0."""

    def held(weight: Tensor, side: RoundedSides) -> Tensor:
        groups = weight.reshape(len(weight), -1, group)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
        scale = ((high - low) / LEVELS).clamp(min=torch.finfo(torch.float32).smallest_normal)
        zero = (-MIDDLE - torch.round(side.position(low / scale, low))).clamp(-MIDDLE, LEVELS - MIDDLE)
        positions = torch.round(side.position(groups * (1.0 / scale), groups))
        integers = (positions + zero).clamp(-MIDDLE, LEVELS - MIDDLE)
        return ((integers - zero) * side.scale(scale)).reshape(weight.shape)

    return Dequantized(original, held)


class KernelLinear(nn.Module):
    """Linear layer with four bits per weight, multiplied by torch's kernel for the CPU in FP32; it shares the bias."""

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.channels = original.out_features
        weight = _padded(original.weight.detach(), GROUP)
        integers, scale, zero = quantize(pad(weight, (0, 0, 0, -weight.shape[0] % TILE)))
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - the kernel has no public name
        self.register_buffer("weight", pack(integers.int(), 1))
        self.register_buffer("scale", torch.stack([scale, zero], -1).transpose(0, 1).contiguous())
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = _padded(x.reshape(-1, x.shape[-1]), GROUP)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - as above
        product = multiply(rows, self.weight, GROUP, self.scale)
        out: Tensor = product[:, : self.channels].reshape(*x.shape[:-1], self.channels)
        return out.contiguous() if self.bias is None else out + self.bias


class NibbleLinear(nn.Module):
    """Linear layer with four bits per weight for every device: two weights in a byte, unpacked for every product."""

    weight: Tensor
    scale: Tensor

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.inputs = original.in_features
        integers, scale, zero = quantize(_padded(original.weight.detach(), GROUP))
        pairs = integers.to(torch.uint8).reshape(len(integers), -1, 2)
        self.register_buffer("weight", pairs[..., 0] + 16 * pairs[..., 1])
        self.register_buffer("scale", torch.stack([scale, zero]))
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        nibbles = torch.stack([self.weight & 15, self.weight >> 4], -1)
        scale, zero = self.scale.unsqueeze(-1)
        groups = (nibbles.reshape(*scale.shape[:-1], GROUP).to(x.dtype) - MIDDLE) * scale + zero
        return linear(x, groups.flatten(1)[:, : self.inputs], self.bias)


class Int4(Replacing):
    """Replaces every linear layer by one with packed weights, each taken by one call of `operator`."""

    promise = (
        f"Linear layers store 4-bit weights (one scale and zero point per group of {GROUP}); activations stay float32."
    )
    source = "https://docs.pytorch.org/ao/stable/workflows/inference.html"
    oracle = f"int4-packed-{GROUP}"
    workloads = WORKLOADS
    stored = torch.uint8

    def __init__(self, name: str, layer: type[KernelLinear | NibbleLinear], operator: str, level: int = 1) -> None:
        self.name, self.layer, self.operator, self.level = name, layer, operator, level
        self.action = f"{operator} of packed weights"

    def capability(self, device: Device) -> Capability:
        if self.layer is KernelLinear and not device.has("host"):
            reason = f"aten::_weight_int4pack_mm_for_cpu runs on the CPU, not on {device.name}"
            return unsupported(Code.NO_FEATURE, reason, "use int4-weight-only")
        return SUPPORTED

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return packed(linear)


def _padded(matrix: Tensor, multiple: int) -> Tensor:
    """Appends zero columns to `matrix` up to the next multiple."""
    return pad(matrix, (0, -matrix.shape[1] % multiple))


TECHNIQUES: tuple[Technique, ...] = (
    Int4("int4-weight-only", NibbleLinear, "aten::bitwise_and"),
    Int4("int4-weight-only-kernel", KernelLinear, "aten::_weight_int4pack_mm_for_cpu", level=2),
)
