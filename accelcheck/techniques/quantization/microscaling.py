"""Products of block-scaled float8 and float4 operands by torchao: MXFP8, MXFP4 and NVFP4, and their FP64 emulation.

Formats: OCP Microscaling Formats (MX) v1.0, and NVIDIA's NVFP4 with one scale per tensor besides those of its blocks.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from accelcheck.core.capability import BY_TRIAL, Capability, Code, unavailable, unsupported
from accelcheck.core.quiet import torchao_imported
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.float8 import WORKLOADS
from accelcheck.techniques.quantization.int8 import Replacing
from accelcheck.techniques.quantization.torchao import AO_PACKAGE

FLOAT4 = emulation.Limits(smallest_normal=1.0, eps=0.5, max=6.0)
"""E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
_MX, _NV = ("torchao.prototype.mx_formats." + module for module in ("mx_tensor", "nvfp4_tensor"))


@dataclass(frozen=True)
class BlockScheme:
    """Format of both operands; a plain value, which can be pickled for the process that computes oracles.

    `block` neighbours along a row share a scale: a power of two (MX) or, with `two`, a float8 number besides one FP32
    scale per tensor (NVFP4).
    """

    limits: torch.dtype | emulation.Limits
    block: int
    two: bool = False

    def pad(self, x: Tensor) -> Tensor:
        """Fills the rows up with zeros to whole blocks: torchao refuses others, and zeros change no scale."""
        return pad(x, (0, -x.shape[-1] % self.block)).contiguous()

    def quantized(self, x: Tensor) -> Any:
        """Quantizes a matrix by torchao, with scales that are rounded up where they are powers of two."""
        with torchao_imported():
            tools: Any = importlib.import_module(_NV if self.two else _MX)
        if self.two:
            return tools.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tools.per_tensor_amax_to_scale(x.abs().max()))
        elements = self.limits if isinstance(self.limits, torch.dtype) else torch.float4_e2m1fn_x2
        return tools.MXTensor.to_mx(x, elements, self.block, tools.ScaleCalculationMode.RCEIL)

    def grid(self, x: Tensor, side: emulation.RoundedSides, relative: float) -> Tensor:
        """Quantizes and dequantizes FP32 rows in FP64, to the sides of a run: values err by `relative` before."""
        blocks = self.pad(x).reshape(*x.shape[:-1], -1, self.block)
        most = blocks.abs().amax(-1, keepdim=True)
        largest = (torch.finfo(self.limits) if isinstance(self.limits, torch.dtype) else self.limits).max
        if self.two:
            whole = most.max().double().clamp(min=2.0**-100) / (448.0 * largest)
            scale = side.position(most / largest / whole, most, relative).clamp(min=2.0**-6)
            scale = emulation.nearest(scale, torch.float8_e4m3fn) * whole
        else:
            share = side.position(most / largest, most, relative)
            scale = torch.exp2(torch.log2(share).ceil().clamp(min=-126.0))
        elements = emulation.nearest(side.position(blocks / scale, blocks, relative), self.limits)
        return (elements * scale).flatten(-2)[..., : x.shape[-1]]

    def held(self, weight: Tensor, side: emulation.RoundedSides) -> Tensor:
        """Quantizes and dequantizes an FP32 weight: see `Dequantized`."""
        return self.grid(weight, side, emulation.POSITION_ERROR)


class BlockGrid(nn.Module):
    """Quantizes and dequantizes activations, FP64 in and out. `flips` works as in `Quantizer`."""

    def __init__(self, scheme: BlockScheme) -> None:
        super().__init__()
        self.scheme = scheme
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), disable_current_modes():
            return self.scheme.grid(x.float(), emulation.RoundedSides(self.flips), emulation.RELATIVE)


class BlockScaledLinear(nn.Module):
    """Linear layer that quantizes both operands by torchao, and widens them for the product.

    Blackwell alone multiplies these formats; torchao's own emulation of MX products widens them too.
    """

    def __init__(self, original: nn.Linear, scheme: BlockScheme) -> None:
        super().__init__()
        self.scheme, self.bias = scheme, original.bias
        self.held = scheme.quantized(scheme.pad(original.weight.detach()))
        self.register_buffer("weight", self.held.qdata)
        self.register_buffer("scale", self.held.scale)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.scheme.quantized(self.scheme.pad(x.reshape(-1, x.shape[-1])))
        out = linear(rows.dequantize(x.dtype), self.held.dequantize(x.dtype), self.bias)
        return out.reshape(*x.shape[:-1], -1)


class BlockScaled(Replacing):
    """Replaces every linear layer by a `BlockScaledLinear`."""

    source = "https://github.com/pytorch/ao/tree/main/torchao/prototype/mx_formats"
    workloads = WORKLOADS
    layer = BlockScaledLinear
    packages = {"torchao": AO_PACKAGE}  # noqa: RUF012 - as in the base class

    def __init__(self, name: str, text: str, scheme: BlockScheme, stored: torch.dtype, *, level: int) -> None:
        self.name, self.scheme, self.stored, self.level = name, scheme, stored, level
        self.promise = f"Linear layers round activations and weights to {text}, and multiply what is left exactly."
        self.action = f"{name} operands widened for a product"

    def capability(self, device: Device) -> Capability:
        """Tries whether the device quantizes and widens numbers that are exact in the format."""
        x = torch.tensor([[6.0, -0.5, 0.0, 1.5, -2.0, 3.0, -4.0, 1.0] * 4])
        try:
            back = self.scheme.quantized(x.to(device.torch_device())).dequantize(torch.float32).cpu()
        except ImportError as error:
            return unavailable(Code.WRONG_VERSION, f"torchao has no {self.name}: {error}", AO_PACKAGE)
        except (RuntimeError, TypeError) as error:
            reason = f"{device.name} does not round to {self.name}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_DTYPE, reason, tried=True)
        if not torch.equal(back, x):
            raise RuntimeError(f"{device.name}: to {self.name} and back: expected {x.tolist()}, got {back.tolist()}")
        return BY_TRIAL

    @property
    def oracle(self) -> str:
        return f"{self.name}-blocks"

    def make(self, linear: nn.Linear) -> nn.Module:
        return self.layer(linear, self.scheme)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulation.Dequantized(linear, self.scheme.held, BlockGrid(self.scheme))


_POWER = "with a power of two per 32 neighbours"
_TWO = "with a float8 scale per 16 neighbours and an FP32 scale per tensor"

TECHNIQUES: tuple[Technique, ...] = tuple(
    BlockScaled(name, text, BlockScheme(limits, block, two), stored, level=level)
    for name, text, limits, block, two, stored, level in (
        ("mxfp8", f"float8 {_POWER}", torch.float8_e4m3fn, 32, False, torch.float8_e4m3fn, 1),
        ("mxfp4", f"float4 {_POWER}", FLOAT4, 32, False, torch.uint8, 2),
        ("nvfp4", f"float4 {_TWO}", FLOAT4, 16, True, torch.uint8, 2),
    )
)
