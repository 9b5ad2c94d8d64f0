"""Torch-TensorRT: exported programs compiled to TensorRT engines, in FP32, FP16 and int8. NVIDIA GPUs only.

Networks are strongly typed: each operator computes in the dtype that it has in the exported graph, so that the module
is cast or quantized before it is exported. Since torch-tensorrt 2.14 there is no other kind; until then,
``enabled_precisions`` let TensorRT choose. For int8, NVIDIA's modelopt inserts quantize and dequantize operators.
"""

import copy
import importlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.packages import installed
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.conversion import Conversion, Converted
from accelcheck.techniques.observe import at_least, exactly
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.int8 import Holder, Quantized, count
from accelcheck.workloads.base import Program

INSTALL = "pip install 'accelcheck[tensorrt]': the release of torch-tensorrt must be that of torch"
PACKAGES: Mapping[str, str] = MappingProxyType({"torch_tensorrt": INSTALL})
ENGINES = frozenset({"TorchTensorRTModule", "PythonTorchTensorRTModule"})
"""Class names of the submodules that hold an engine; the second one until torch-tensorrt 2.13."""
OPTIONS: Mapping[str, Any] = {
    "min_block_size": 1,  # default 5: torch would run smaller graphs
    "disable_tf32": True,  # default False: products of FP32 tensors in TF32
    "use_explicit_typing": True,  # until 2.13; later versions have no other kind
    "cache_built_engines": False,
    "reuse_cached_engines": False,
}
"""Options of ``torch_tensorrt.dynamo.compile``; those that a version does not have are left out."""


class Engines(Converted):
    """Graph module with TensorRT engines as submodules, from an exported program and example inputs on the GPU."""

    kind = "compiled graph"

    def __init__(self, module: nn.Module, exported: ExportedProgram, inputs: tuple[Any, ...]) -> None:
        build = importlib.import_module("torch_tensorrt").dynamo.compile
        known = inspect.signature(build).parameters
        options = {name: value for name, value in OPTIONS.items() if name in known}
        self.exported = exported
        self.graph: nn.Module = build(exported, arg_inputs=list(inputs), **options)
        self.engines = [part for part in self.graph.modules() if type(part).__name__ in ENGINES]
        self.runs = 0
        for engine in self.engines:
            engine.register_forward_hook(self._ran)
        super().__init__(module, self.graph)

    def _ran(self, engine: nn.Module, inputs: Any, out: Any) -> None:
        self.runs += 1

    def reset(self) -> None:
        super().reset()
        self.runs = 0

    @property
    def left(self) -> list[str]:
        """Sorted names of the operators that torch runs, without those that unpack an engine's outputs."""
        graphs = [part.graph for part in self.graph.modules() if isinstance(part, torch.fx.GraphModule)]
        calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        return sorted(str(node.target) for node in calls if isinstance(node.target, torch_names.OpOverload))

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        yield at_least("TensorRT engines", len(self.engines))
        yield at_least("runs of engines", self.runs, max(1, len(self.engines)))
        # For information: as documented, torch runs what TensorRT cannot convert.
        yield Evidence("operators left to torch (any number)", ", ".join(self.left) or 0, engaged=True)


class TensorRt(Conversion):
    """TensorRT in FP32, without TF32."""

    name = "tensorrt-fp32"
    family = "tensorrt"
    promise = "TensorRT engines compute from the exported graph, in FP32, what torch computes."
    source = "https://docs.pytorch.org/TensorRT/user_guide/compilation/dynamo_export.html"
    level = 3  # an engine takes seconds to a minute to build
    early = frozenset({"mlp", "transformer-block", "digits-mlp"})
    workloads = frozenset({"elementwise-5", "mlp", "cnn", "attention-causal", "transformer-block", "digits-mlp"})
    packages = PACKAGES
    engines: type[Engines] = Engines

    def capability(self, device: Device) -> Capability:
        if not device.has("torch-cuda") or device.has("hip"):
            return unsupported(Code.NO_BACKEND, f"TensorRT builds engines for NVIDIA GPUs, not for {device.name}")
        if all(installed(package) for package in self.packages):
            for package in self.packages:
                try:
                    importlib.import_module(package)
                except Exception as error:  # noqa: BLE001 - a plain one where TensorRT's libraries are absent
                    return unavailable(Code.IMPORT_FAILED, f"{package} does not import: {error}", INSTALL)
        return SUPPORTED

    def changed(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """Returns the module to export: `module` itself, or a copy that is cast or quantized."""
        return module

    def exporting(self) -> AbstractContextManager[Any]:
        """Makes the context for the export."""
        return nullcontext()

    def converted(self, program: Program, device: Device) -> Engines:
        changed = self.changed(program.module, program.inputs)
        with self.exporting():
            exported = torch.export.export(changed, program.inputs)
        return self.engines(program.module, exported, program.inputs)


class HalfModule(nn.Module):
    """Copy of a module in FP16, with FP32 inputs and outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).half()

    def forward(self, *inputs: Any) -> Any:
        return pytree.tree_map(_as(torch.float32), self.module(*map(_as(torch.float16), inputs)))


class HalvedEngines(Engines):
    """Engines of a program in FP16."""

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        values = [node.meta.get("val") for node in self.exported.graph.nodes if node.op == "call_function"]
        halves = sum(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values)
        yield at_least("operators of the exported graph with float16 results", halves)


class TensorRtHalf(TensorRt):
    """TensorRT in FP16, with casts of the inputs and outputs."""

    name = "tensorrt-fp16"
    promise = "TensorRT engines compute the exported graph in FP16, with FP32 inputs and outputs."
    source = "https://docs.pytorch.org/TensorRT/user_guide/shapes_precision/mixed_precision.html"
    workloads = frozenset({"mlp", "cnn", "attention-causal", "transformer-block", "digits-mlp"})
    engines = HalvedEngines

    def precision(self, dtype: str) -> str:
        return "float16"

    def changed(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return HalfModule(module)


class QuantizedEngines(Engines):
    """Engines of a program with int8 linear layers."""

    def __init__(self, module: nn.Module, exported: ExportedProgram, inputs: tuple[Any, ...]) -> None:
        super().__init__(module, exported, inputs)
        self.layers = count(module, emulation.is_linear)

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        quantizers = sum("tensorrt.quantize_op" in str(node.target) for node in self.exported.graph.nodes)
        wanted = 2 * self.layers  # one for the input and one for the weight of each
        yield Evidence(f"int8 quantizers in the exported graph = {wanted} >= 2", quantizers, quantizers == wanted >= 2)
        yield exactly("of them left to torch", sum("tensorrt.quantize_op" in name for name in self.left), 0)


class TensorRtInt8(Quantized, TensorRt):
    """Linear layers with int8 weights (a scale per channel) and inputs (a scale per tensor, from the judged inputs).

    The rule of modelopt's ``INT8_DEFAULT_CFG`` and of Torch-TensorRT's converter: scale max|x| / 127, no zero point,
    ties to even, range -128 to 127. It would also quantize inputs of layer norms, which these workloads do not have.
    """

    name = "tensorrt-int8"
    family = "tensorrt"
    promise = "TensorRT engines multiply int8 inputs and weights, with calibrated scales; everything else is FP32."
    source = "https://docs.pytorch.org/TensorRT/user_guide/shapes_precision/quantization.html"
    workloads = frozenset({"mlp", "digits-mlp"})
    packages = MappingProxyType({**PACKAGES, "modelopt": INSTALL})
    oracle = "int8-max-127"
    engines = QuantizedEngines

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        TensorRt.prepare(self, program, mode, device)

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        tool = importlib.import_module("modelopt.torch.quantization")
        out: nn.Module = tool.quantize(module, tool.INT8_DEFAULT_CFG, forward_loop=lambda model: model(*inputs))
        return out

    def changed(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return self.quantized(Holder(emulation.eval_copy(module)), inputs)

    def exporting(self) -> AbstractContextManager[Any]:
        tools: Any = importlib.import_module("modelopt.torch.quantization.utils")
        context: AbstractContextManager[Any] = tools.export_torch_mode()
        return context

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        copied = emulation.eval_copy(module)
        seen = emulation.calibrate(copied, inputs)
        return emulation.replaced(copied, lambda linear: emulated(linear, seen[linear]))


def emulated(linear: nn.Linear, seen: emulation.Ranges) -> emulation.Dequantized:
    """Makes the FP64 emulation of a linear layer whose operands are rounded to multiples of max|x| / 127."""
    largest = torch.tensor(max(-seen.low_in, seen.high_in), dtype=torch.float32)
    scale = largest / 127.0
    return emulation.Dequantized(
        linear,
        lambda weight, side: emulation.symmetric(weight, weight.abs().amax(1, keepdim=True) / 127.0, side),
        emulation.Quantizer(lambda _: (scale, 0), -128, 127),
    )


def _as(dtype: torch.dtype) -> Any:
    return lambda value: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


TECHNIQUES: tuple[Technique, ...] = (TensorRt(), TensorRtHalf(), TensorRtInt8())
