"""Linear layers with float8 operands, multiplied by ``torch._scaled_mm``, and their FP64 emulation."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from accelcheck.core.capability import BY_TRIAL, SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, Operator
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.int8 import Replacing
from accelcheck.verify.precision import FLOAT8_UNITS, UNIT_ROUNDOFF, MatrixUnit
from accelcheck.workloads.base import Program

TILE = 16
"""Matrix units need multiples of this number in both dimensions of a float8 weight; others are padded with zeros."""
NEEDED = (8, 9)
"""Lowest CUDA compute capability with float8 matrix units (https://docs.nvidia.com/cuda/cuda-c-programming-guide)."""
_NO_CAST = re.compile(
    r"not implemented for '?Float8|Float8\w* (?:is )?not supported"
    r"|convert Float8\w* to the \w+ backend|Could not run 'aten::"
)
"""Pattern of torch's errors where a device type has no float8 at all."""

_REFUSALS = re.compile(
    r"_scaled_mm is only supported on"  # CUDA and ROCm, by architecture
    r"|output types are supported for row-wise scaling"
    r"|_scaled_mm only supports per-tensor scaling"  # the CPU, up to torch 2.9
    r"|Type not supported: Float8"
    r"|itensor_view_from_dense expects .*Float8"  # oneDNN on a chip with AMX has the formats of OCP alone
    r"|Cannot convert ScalarType Float8"  # cuBLAS has no FNUZ formats
    r"|Expected [ab]\.dtype\(\) == at::kFloat8"
    r"|(?:CU|HIP)BLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH)"
    rf"|{_NO_CAST.pattern}"
)
"""Pattern of torch's errors where a device, its library or this torch has no such product; others are errors."""
WORKLOADS = frozenset({"mlp", "mlp-blocks", "multi-head-attention", "transformer-block", "digits-mlp", "digits-vit"})
"""Workloads with inputs of several dimensions, sizes that are no multiples of `TILE`, and several layers."""


def scale_of(x: Tensor, dtype: torch.dtype, *, rows: bool) -> Tensor:
    """Computes the FP32 scale that maps the largest magnitude to a float8 maximum: per row, ``(..., 1)``, or ``()``."""
    sizes = x.float().abs()
    # `max`: in torch_xla 2.9, `amax` over all dimensions returns the tensor itself.
    largest = sizes.amax(-1, keepdim=True) if rows else sizes.max()
    return (largest / torch.finfo(dtype).max).clamp(min=emulation.EPSILON)


def quantize(x: Tensor, dtype: torch.dtype, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Casts a tensor's elements to float8, of its shape, with their FP32 scale."""
    scale = scale_of(x, dtype, rows=rows)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


class Float8Linear(nn.Module):
    """Linear layer that multiplies float8 operands; its output has the dtype of the input. The bias is the original's.

    With `rows` it has one scale per token and per output channel, otherwise one scale per operand.
    """

    weight: Tensor
    scale: Tensor
    quantize = staticmethod(quantize)

    def __init__(self, original: nn.Linear, dtype: torch.dtype, *, rows: bool) -> None:
        super().__init__()
        self.channels, self.dtype, self.rows = original.out_features, dtype, rows
        weight, scale = self.quantize(original.weight.detach(), dtype, rows=rows)
        # Padded and used transposed: `torch._scaled_mm` needs a column-major second operand.
        self.register_buffer("weight", _padded(_padded(weight, 1), 0))
        self.register_buffer("scale", _padded(scale, 0, 1.0).t().contiguous() if rows else scale)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        elements, scale = self.quantize(x.reshape(-1, x.shape[-1]), self.dtype, rows=self.rows)
        product = torch_names.scaled_mm(
            _padded(elements, 1),
            self.weight.t(),
            scale_a=scale,
            scale_b=self.scale,
            out_dtype=x.dtype,
            use_fast_accum=False,  # Hopper would keep 14 bits to the end: `accelcheck.verify.precision.FLOAT8_UNITS`
        )
        out = product[:, : self.channels].reshape(*x.shape[:-1], self.channels)
        return out.contiguous() if self.bias is None else out + self.bias


class WidenedLinear(nn.Module):
    """Linear layer that stores its weight in float8, with one scale per channel, and widens it for every product."""

    weight: Tensor
    scale: Tensor
    quantize = staticmethod(quantize)

    def __init__(self, original: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight, scale = self.quantize(original.weight.detach(), dtype, rows=True)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Float8Grid(nn.Module):
    """Casts activations to float8: FP64 in, FP64 out. `flips` works as in `Quantizer`, `rows` as in `Float8Linear`.

    The activations come from sums of a matrix `unit`; None for sums in FP32.
    """

    def __init__(self, dtype: torch.dtype, *, rows: bool, unit: MatrixUnit | None = None) -> None:
        super().__init__()
        self.dtype, self.rows, self.unit = dtype, rows, unit
        # The error of a sum that is cut off; like `RELATIVE`, it decides which values may be rounded to either side.
        self.relative = emulation.RELATIVE if unit is None else max(emulation.RELATIVE, 2.0**-unit.kept)
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the elements on the float8 grid, their scale, and the product of both, of the shape of `x`."""
        # Without dispatch modes: the oracle must not simulate rounding errors here, since `flips` accounts for them.
        with torch.no_grad(), disable_current_modes():
            single = x.float()
            scale = scale_of(single, self.dtype, rows=self.rows)
            if self.flips is not None:
                chance = 2 * torch.rand((), generator=self.flips) - 1
                scale = scale * (1 + self.relative * chance)
            elements = emulation.nearest(single / scale, self.dtype, self.flips, self.relative).double()
            scale = emulation.RoundedSides(self.flips).scale(scale)
            return elements, scale, elements * scale


def on_grid(weight: Tensor, dtype: torch.dtype, side: emulation.RoundedSides, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Quantizes an FP32 weight like `quantize`, in FP64, to a run's sides."""
    scale = scale_of(weight, dtype, rows=rows)
    return emulation.nearest(side.position(weight / scale, weight), dtype), side.scale(scale)


def dequantized(weight: Tensor, side: emulation.RoundedSides, *, dtype: torch.dtype, rows: bool) -> Tensor:
    """Multiplies the elements of `on_grid` by their scale."""
    elements, scale = on_grid(weight, dtype, side, rows=rows)
    return elements * scale


class EmulatedProduct(emulation.Dequantized):
    """FP64 emulation of a `Float8Linear`. With `flips`, as in `Quantizer`, its sums are those of the unit of `grid`.

    That unit is None for sums in FP32, whose rounding errors the oracle simulates itself.
    """

    def __init__(self, layer: nn.Linear, grid: Float8Grid) -> None:
        super().__init__(layer, partial(dequantized, dtype=grid.dtype, rows=grid.rows))
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        elements, scale, values = self.grid(x)
        out: Tensor = linear(values, self.taken(), self.bias)
        if self.grid.unit is None or self.flips is None:
            return out
        with torch.no_grad(), disable_current_modes():
            held, own = on_grid(self.original, self.grid.dtype, emulation.RoundedSides(self.flips), rows=self.grid.rows)
            # The kernel chooses the products that meet in one step.
            order = torch.randperm(x.shape[-1], generator=self.flips)
            rows, columns = elements.reshape(-1, x.shape[-1])[:, order], held.t()[order]
            wrong = (emulation.summed(rows, columns, self.grid.unit) - rows @ columns).reshape(out.shape)
            out += wrong * scale * (own.t() if self.grid.rows else own)
        return out


@dataclass(frozen=True)
class Float8Scheme:
    """Makes the FP64 emulation of a module whose linear layers multiply float8 operands: see `Technique.emulate`.

    A plain value, which can be pickled for the process that computes oracles. `rows` is that of `Float8Linear`, `unit`
    None for sums in FP32; `whole_tiles` leaves layers alone whose sizes are no multiples of `TILE`.
    """

    dtype: torch.dtype
    rows: bool
    unit: MatrixUnit | None
    whole_tiles: bool = False

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return emulation.replaced(emulation.eval_copy(module), self.layer)

    def layer(self, original: nn.Linear) -> nn.Module:
        """Makes the emulation of one layer."""
        if self.whole_tiles and any(size % TILE for size in original.weight.shape):
            return original
        return EmulatedProduct(original, Float8Grid(self.dtype, rows=self.rows, unit=self.unit))

    def __str__(self) -> str:
        words = (
            str(self.dtype).removeprefix("torch."),
            "token-channel" if self.rows else "tensor",
            *(["tiled"] if self.whole_tiles else []),
            *([self.unit.name.partition(":")[0].lower().replace(" ", "-")] if self.unit else []),
        )
        return "-".join(words)


def widened(layer: nn.Linear, dtype: torch.dtype) -> emulation.Dequantized:
    """Makes the FP64 emulation of a `WidenedLinear`."""
    return emulation.Dequantized(layer, partial(dequantized, dtype=dtype, rows=True))


def unit_of(device: Device) -> MatrixUnit | None:
    """Returns the float8 matrix unit of a device; None where it is not known, or only FP32's accumulator is."""
    if not device.has("torch-cuda") or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return FLOAT8_UNITS.get(torch.cuda.get_device_capability())


def sums(unit: MatrixUnit | None) -> Evidence:
    """Makes evidence, for information only, of the unit whose rounding the sums of float8 products may have."""
    held = "FP32: nothing else is known of this chip" if unit is None else unit.name
    return Evidence("sums of float8 products are held to (for information)", held, engaged=True)


def tried(device: Device, dtype: torch.dtype, out: torch.dtype, *, rows: bool) -> Capability:
    """Tells whether the open device multiplies a float8 dtype to dtype `out`, tried with a product of ones.

    Raises a RuntimeError if the product is wrong, and any error of torch that is not one of `_REFUSALS`.
    """
    layer = nn.Linear(TILE, TILE, bias=False)
    nn.init.ones_(layer.weight)
    place = device.torch_device()
    device.reset_fallbacks()
    try:
        got = Float8Linear(layer.to(place), dtype, rows=rows)(torch.ones(TILE, TILE, dtype=out).to(place)).cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        if not _REFUSALS.search(str(error)):
            raise
        reason = f"{device.name} does not multiply {dtype} to {out}: {str(error).splitlines()[0]}"
        if device.has("torch-cuda") and torch.version.hip is None and torch.cuda.get_device_capability() < NEEDED:
            return unavailable(Code.NO_HARDWARE, reason, "use a GPU with compute capability 8.9 or higher")
        return unsupported(Code.NO_FEATURE, reason, tried=True)
    if strays := device.fallbacks():
        return _left(device, strays)
    # The elements' sum is exact in every unit; the two scales, their product and the result are rounded to FP32.
    if not bool(((got.double() / TILE - 1).abs() <= 4 * UNIT_ROUNDOFF["float32"]).all()):
        raise RuntimeError(f"{device.name}: sums of {TILE} products of ones in {dtype}: expected {TILE}, got {got}")
    return BY_TRIAL


def _left(device: Device, strays: Iterable[str]) -> Capability:
    reason = f"{device.name} falls back to the CPU for {', '.join(sorted(strays))}"
    return unsupported(Code.NO_FEATURE, reason, tried=True)


def is_product(operator: Operator, dtype: torch.dtype) -> bool:
    """Returns whether an operator multiplies two operands of a float8 dtype."""
    return operator.name == "aten::_scaled_mm" and [seen for seen, _, _ in operator.inputs[:2]] == [dtype] * 2


class ScaledProduct(Replacing):
    """Replaces every linear layer by a `Float8Linear`."""

    family = "precision"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_mm.html"
    dtypes = ("float32", "bfloat16")
    workloads = WORKLOADS
    layer = Float8Linear

    def __init__(self, name: str, dtype: torch.dtype, *, rows: bool, level: int = 1) -> None:
        self.name, self.stored, self.rows, self.level = name, dtype, rows, level
        self.format = str(dtype).removeprefix("torch.")
        self.unit: MatrixUnit | None = None
        self.action = f"{self.format} products (aten::_scaled_mm)"
        each = "token and channel" if rows else "tensor"
        self.promise = f"Linear layers multiply {self.format} activations and weights, with one scale per {each}."

    def capability(self, device: Device) -> Capability:
        """Tries FP32 and bfloat16 outputs: kernels differ. From here on, `oracle` and `emulate` fit the device."""
        self.unit = unit_of(device)
        answers = [tried(device, self.stored, out, rows=self.rows) for out in (torch.float32, torch.bfloat16)]
        return next((answer for answer in answers if answer.ok), answers[0])

    @property
    def oracle(self) -> str:
        return str(self.emulate)

    @property
    def emulate(self) -> Float8Scheme:  # a callable value, which the oracle's process gets as it is now
        """FP64 emulation for the device that was last asked about."""
        return Float8Scheme(self.stored, self.rows, self.unit)

    def make(self, linear: nn.Linear) -> nn.Module:
        return self.layer(linear, self.stored, rows=self.rows)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return self.emulate.layer(linear)

    def is_action(self, operator: Operator) -> bool:
        return is_product(operator, self.stored)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        out = next(program.module.parameters()).dtype
        if not (answer := tried(device, self.stored, out, rows=self.rows)).ok:
            raise Unsupported(answer)
        self.unit = unit_of(device)
        super().prepare(program, mode, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield sums(self.unit)


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
        """Tries whether numbers that are exact in float8 survive a cast there and back."""
        held = torch.tensor([448.0, -0.001953125, 1.125])
        device.reset_fallbacks()
        try:
            back = held.to(device.torch_device()).to(self.stored).to(torch.float32).cpu()
        except (RuntimeError, TypeError) as error:
            if not _NO_CAST.search(str(error)):
                raise
            reason = f"{device.name} has no {self.stored}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_DTYPE, reason, tried=True)
        if strays := device.fallbacks():
            return _left(device, strays)
        if not torch.equal(back, held):
            change = f"expected {held.tolist()}, got {back.tolist()}"
            raise RuntimeError(f"{device.name}: to {self.stored} and back: {change}")
        return SUPPORTED

    def make(self, linear: nn.Linear) -> nn.Module:
        return self.layer(linear, self.stored)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return widened(linear, self.stored)


def _padded(x: Tensor, dim: int, value: float = 0.0) -> Tensor:
    """Appends `value` to a matrix along a dimension, up to a multiple of `TILE`."""
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
