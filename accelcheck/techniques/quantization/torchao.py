"""Quantization by torchao's ``quantize_``: int8, float8 and int4 weights for linear layers. Forward only."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import nn

from accelcheck.core.capability import BY_TRIAL, SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.quiet import torchao_imported
from accelcheck.devices.base import Device
from accelcheck.measure.memory import in_memory
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, OperatorLog, operators
from accelcheck.techniques.quantization import emulation, float8, int4
from accelcheck.techniques.quantization.int8 import LayerByLayer, as_module, count, modules, sizes, stored_as
from accelcheck.verify.precision import MatrixUnit
from accelcheck.workloads.base import Program

GROUP = 16
"""Number of weights that share a scale in int4: a divisor of every width in the suite."""
AO_PACKAGE = "pip install 'accelcheck[torchao]'"


class TorchAO(LayerByLayer):
    """Quantization by ``quantize_`` with a configuration of version 2, which turns weights into tensor subclasses."""

    source = "https://docs.pytorch.org/ao/stable/api_reference/api_ref_quantization.html"
    config: str
    """Name of the configuration class in ``torchao.quantization``."""
    tensor = "Int8Tensor"
    """Class name of the quantized weights."""
    stored = torch.int8
    """Dtype of the stored integers or floats."""

    def capability(self, device: Device) -> Capability:
        return torchao_capability(self.config)

    def converts(self, layer: nn.Module) -> bool:
        """Returns whether a layer is to be quantized; by default, every linear layer is."""
        return emulation.is_linear(layer)

    def settings(self, torchao: Any) -> dict[str, Any]:
        """Makes the arguments of the configuration; `torchao` is the module ``torchao.quantization``."""
        # By default, `quantize_` changes inductor's configuration for the rest of the process.
        return {"set_inductor_config": False}

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        torchao = torchao_quantization()
        config = getattr(torchao, self.config)(**self.settings(torchao))
        torchao.quantize_(module, config, filter_fn=lambda layer, _: self.converts(layer))
        return module

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = count(program.module, self.converts)
        weights: list[Any] = [
            layer.weight for layer in modules(program.call) if isinstance(layer, nn.Linear) and self.converts(layer)
        ]
        tensors = [weight for weight in weights if type(weight.data).__name__ == self.tensor]
        claim = f"linear layers with a weight of type {self.tensor} = {wanted} >= 1"
        yield Evidence(claim, len(tensors), engaged=len(tensors) == wanted >= 1)
        yield stored_as(str(self.stored), (weight.qdata.dtype for weight in tensors))
        after = sum(in_memory(weight.data) for weight in tensors)
        yield from sizes(program.module, as_module(program.call), after, self.converts)
        yield self.ran(log, wanted)

    def ran(self, log: Log, wanted: int) -> Evidence:
        """Makes evidence from the log that `wanted` layers used their stored weights: by default, widened them."""
        runs = operators(log).having(lambda op: op.name == "aten::_to_copy" and op.takes(self.stored))
        claim = f"{self.name.partition('-')[0]} weights widened for a product >= {wanted}"
        return Evidence(claim, runs, engaged=runs >= wanted >= 1)


class TorchAODynamic(TorchAO):
    """int8 weights and activations; activations are quantized at run time with one scale per token."""

    name = "int8-torchao-dynamic"
    promise = "Linear layers multiply int8 activations (one scale per token) by int8 weights (one scale per channel)."
    config = "Int8DynamicActivationInt8WeightConfig"
    oracle = "int8-token-channel"

    def capability(self, device: Device) -> Capability:
        torchao = super().capability(device)
        return BY_TRIAL if torchao.ok and not device.has("integer-products") else torchao

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if not device.has("integer-products"):  # `torchao.kernel.safe_int_mm` may widen both operands
            layer = nn.Sequential(nn.Linear(16, 16)).to(device.torch_device()).eval()
            tried = self.quantized(layer, ())
            with torch.no_grad(), OperatorLog(device.type) as log:
                tried(torch.ones(16, 16, device=device.torch_device()))
            if not self.ran(log, 1).engaged:
                made = sorted({str(kind) for op in log.operators if op.name == "aten::mm" for kind, _, _ in op.inputs})
                fact = f"it widens them to {', '.join(made) or 'another dtype'}"
                reason = f"torchao multiplies no int8 values on {device.name}: {fact}"
                raise Unsupported(unsupported(Code.NO_BACKEND, reason, tried=True))
        super().prepare(program, mode, device)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulation.EmulatedLinear(linear, before=emulation.Quantizer(emulation.per_token, -128, 127))

    def ran(self, log: Log, wanted: int) -> Evidence:
        runs = operators(log).having(lambda op: op.name == "aten::_int_mm" and op.takes(torch.int8))
        return Evidence(f"int8 matrix products (aten::_int_mm) >= {wanted}", runs, engaged=runs >= wanted >= 1)


class TorchAOWeightOnly(TorchAO):
    """int8 weights, floating-point activations."""

    name = "int8-torchao-weight-only"
    promise = "Linear layers store int8 weights (one scale per channel); activations stay in floating point."
    config = "Int8WeightOnlyConfig"
    oracle = "int8-weight-channel"

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulation.EmulatedLinear(linear)


def torchao_quantization() -> Any:
    """Imports the module ``torchao.quantization``."""
    with torchao_imported():
        return importlib.import_module("torchao.quantization")


@cache
def torchao_capability(name: str) -> Capability:
    """Tells whether torchao imports with this torch, and has version 2 of a configuration, which oracles emulate."""
    if importlib.util.find_spec("torchao") is None:
        return unavailable(Code.NO_PACKAGE, "torchao is not installed", AO_PACKAGE)
    pair = f"torchao {importlib.metadata.version('torchao')} with torch {torch.__version__}"
    try:
        quantization = torchao_quantization()
    except (ImportError, AttributeError, RuntimeError) as error:
        advice = "install matching versions of torch and torchao"
        return unavailable(Code.WRONG_VERSION, f"{pair} does not import: {error}", advice)
    config = getattr(quantization, name, None)
    versions = [] if config is None else [field.default for field in fields(config) if field.name == "version"]
    if versions != [2]:
        return unavailable(Code.WRONG_VERSION, f"{pair}: {name} is not of version 2", AO_PACKAGE)
    return SUPPORTED


class Float8WeightOnly(TorchAO):
    """float8 weights, floating-point activations."""

    name = "float8-torchao-weight-only"
    family = "precision"
    level = 2
    promise = "Linear layers store float8 weights (one scale per channel); activations stay in floating point."
    config = "Float8WeightOnlyConfig"
    tensor = "Float8Tensor"
    stored = torch.float8_e4m3fn
    oracle = "float8_e4m3fn-weight-channel"
    workloads = float8.WORKLOADS

    def settings(self, torchao: Any) -> dict[str, Any]:
        return super().settings(torchao) | {"weight_dtype": self.stored}

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return float8.widened(linear, self.stored)


class Float8Dynamic(Float8WeightOnly):
    """float8 weights and activations, one scale per tensor. Layers whose sizes are no multiples of a tile stay."""

    name = "float8-torchao-dynamic"
    promise = "Linear layers multiply float8 activations by float8 weights, with one scale per tensor."
    config = "Float8DynamicActivationFloat8WeightConfig"

    def __init__(self) -> None:
        self.unit: MatrixUnit | None = None

    def capability(self, device: Device) -> Capability:
        """Tries CUDA, ROCm and XPU, as torchao demands. From here on, `oracle` and `emulate` fit the device."""
        self.unit = float8.unit_of(device)
        if not device.has("float8-products"):
            reason = f"torchao supports dynamic float8 only on CUDA, ROCm and XPU, not on {device.name}"
            return unsupported(Code.NO_FEATURE, reason)
        torchao = super().capability(device)
        return float8.tried(device, self.stored, torch.float32, rows=False) if torchao.ok else torchao

    def converts(self, layer: nn.Module) -> bool:
        whole = isinstance(layer, nn.Linear) and not any(size % float8.TILE for size in layer.weight.shape)
        return whole and emulation.is_linear(layer)

    def settings(self, torchao: Any) -> dict[str, Any]:
        # With the fast one, sums on Hopper GPUs keep 14 bits to the end.
        exact = importlib.import_module("torchao.float8.inference").Float8MMConfig(use_fast_accum=False)
        scales = torchao.PerTensor()
        return super().settings(torchao) | {"activation_dtype": self.stored, "granularity": scales, "mm_config": exact}

    @property
    def oracle(self) -> str:  # type: ignore[override]  # the weight-only variant's is the same on every device
        """Name of the scheme, for the device that was last asked about."""
        return str(self.emulate)

    @property
    def emulate(self) -> float8.Float8Scheme:  # as in `float8.ScaledProduct`
        """FP64 emulation for the device that was last asked about."""
        return float8.Float8Scheme(self.stored, rows=False, unit=self.unit, whole_tiles=True)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield float8.sums(self.unit)

    def ran(self, log: Log, wanted: int) -> Evidence:
        runs = operators(log).having(lambda op: float8.is_product(op, self.stored))
        return Evidence(f"float8 matrix products (aten::_scaled_mm) >= {wanted}", runs, engaged=runs >= wanted >= 1)


class Int4WeightOnly(TorchAO):
    """4-bit weights, each stored in a byte, floating-point activations. Runs on every device.

    None of the packings of torchao's `Int4WeightOnlyConfig` runs on a CPU in FP32 (torchao 0.18). Packed weights are
    in `accelcheck.techniques.quantization.int4`.
    """

    name = "int4-torchao-weight-only"
    level = 2
    promise = (
        f"Linear layers store 4-bit weights (one scale and zero point per group of {GROUP}); activations stay in "
        "floating point."
    )
    config = "IntxWeightOnlyConfig"
    tensor = "IntxUnpackedToInt8Tensor"
    oracle = f"int4-unpacked-{GROUP}"
    workloads = int4.WORKLOADS

    def converts(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear) and emulation.is_linear(layer) and not layer.in_features % GROUP

    def settings(self, torchao: Any) -> dict[str, Any]:
        # The default, symmetric integers from -8 to 7, clips the largest weight of a group.
        grid = torchao.MappingType.ASYMMETRIC
        four_bits = torch.int4  # type: ignore[attr-defined]  # torch's stubs have no dtypes below a byte
        return {"weight_dtype": four_bits, "granularity": torchao.PerGroup(GROUP), "mapping_type": grid}

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return int4.unpacked(linear, GROUP) if self.converts(linear) else linear


TECHNIQUES: tuple[Technique, ...] = tuple(
    kind() for kind in (TorchAODynamic, TorchAOWeightOnly, Float8WeightOnly, Float8Dynamic, Int4WeightOnly)
)
