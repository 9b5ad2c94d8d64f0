"""Static int8 quantization of an exported graph (torchao's pt2e), run as a graph and lowered by inductor for x86."""

import importlib
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import Compilation, inductor_capability, inductor_graphs, reset_compiler
from accelcheck.techniques.observe import Log, at_least, operators
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.float8 import WORKLOADS
from accelcheck.techniques.quantization.int8 import Quantized, as_module, count, sizes
from accelcheck.techniques.quantization.torchao import AO_PACKAGE, torchao_capability
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

STEPS = 255
"""Default ``quant_max`` of the quantizer for activations."""
_CONVERTED = "converted graph"
_PT2E = "torchao.quantization.pt2e"


class ExportedInt8(Quantized):
    """Runs the converted graph: linear layers in FP32, between operators that quantize and dequantize."""

    name = "int8-pt2e-static"
    promise = "Linear layers take int8 inputs, with calibrated scales, and int8 weights, with one scale per channel."
    source = "https://docs.pytorch.org/ao/stable/pt2e_quantization/pt2e_quant_x86_inductor.html"
    oracle = "int8-static-input-per-channel"
    level = 2
    early = frozenset({"multi-head-attention", "digits-mlp"})
    workloads = WORKLOADS

    def admits(self, probe: Probe) -> bool:
        """Refuses probes with other shapes: the graph is exported for one."""
        return super().admits(probe) and not probe.reshapes

    def capability(self, device: Device) -> Capability:
        return pt2e_capability()

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> GraphModule:
        tools: Any = importlib.import_module(f"{_PT2E}.quantize_pt2e")
        with torch.no_grad():
            exported = torch.export.export(module.get_submodule("module"), inputs).module()
            prepared = tools.prepare_pt2e(exported, _quantizer())
            prepared(*inputs)
        return _pruned(tools.convert_pt2e(prepared))

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        copied = emulation.eval_copy(module)
        seen = emulation.calibrate(copied, inputs)

        def make(linear: nn.Linear) -> nn.Module:
            ranges = emulation.FixedRange(seen[linear].low_in, seen[linear].high_in, STEPS)
            return emulation.EmulatedLinear(linear, before=emulation.Quantizer(ranges, 0, STEPS))

        return emulation.replaced(copied, make)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        program.extras[_CONVERTED] = program.call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = count(program.module, emulation.is_linear)
        graph = as_module(program.extras[_CONVERTED])
        yield from self.ran(log, wanted)
        weights = [value for value in graph.state_dict().values() if value.dtype == torch.int8]
        yield Evidence(f"int8 weights in the graph = {wanted} >= 1", len(weights), engaged=len(weights) == wanted >= 1)
        yield from sizes(program.module, graph, sum(weight.nbytes for weight in weights))

    def ran(self, log: Log, wanted: int) -> Iterator[Evidence]:
        """Yields evidence from the log that `wanted` layers ran quantized."""
        # Layers that share an input share its quantization, and each dequantizes it.
        least = {"quantize_per_tensor": 1, "dequantize_per_tensor": wanted, "dequantize_per_channel": wanted}
        for operator, number in least.items():
            runs = operators(log).count(f"quantized_decomposed::{operator}")
            yield Evidence(f"{operator} >= {number}", runs, engaged=runs >= number >= 1)


class Lowered(ExportedInt8, Compilation):
    """Compiles the converted graph, with frozen and packed weights, to oneDNN's int8 kernels."""

    name = "int8-pt2e-inductor"
    promise = "As int8-pt2e-static, with products in int8 by the kernels that inductor lowers to."
    level = 3
    early = frozenset({"digits-mlp"})
    workloads = frozenset({"mlp", "mlp-blocks", "digits-mlp"})

    def admits(self, probe: Probe) -> bool:
        """Refuses all probes: int8-pt2e-static runs them with the same quantization, and need not compile."""
        return False

    def capability(self, device: Device) -> Capability:
        if not device.has("inductor-cpp") or platform.machine().lower() not in {"x86_64", "amd64"}:
            return unsupported(Code.NO_BACKEND, f"inductor lowers pt2e graphs on x86 processors, not on {device.name}")
        inductor = inductor_capability(device)
        return pt2e_capability() if inductor.ok else inductor

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        reset_compiler()
        super().prepare(program, mode, device)
        program.call = torch.compile(as_module(program.call))
        # Around calls, not as an option of `compile`: Dynamo reads the setting too, and any call may compile.
        settings: Any = torch_names.inductor_config
        program.around = lambda: settings.patch(freezing=True)

    def ran(self, log: Log, wanted: int) -> Iterator[Evidence]:
        yield at_least("graphs compiled by inductor", inductor_graphs())
        runs = log.count("onednn::qlinear_pointwise(_binary)?")
        yield Evidence(f"onednn::qlinear_pointwise >= {wanted}", runs, engaged=runs >= wanted >= 1)


@cache
def pt2e_capability() -> Capability:
    """Tells whether torchao is installed and has pt2e quantization for x86."""
    if not (torchao := torchao_capability("Int8WeightOnlyConfig")).ok:
        return torchao
    try:
        for part in ("quantize_pt2e", "quantizer.x86_inductor_quantizer"):
            importlib.import_module(f"{_PT2E}.{part}")
    except ImportError as error:
        return unavailable(Code.WRONG_VERSION, f"torchao has no pt2e quantization for x86: {error}", AO_PACKAGE)
    return SUPPORTED


def _quantizer() -> Any:
    """Makes the quantizer for x86, for linear layers only, with ranges from the smallest to the largest value.

    By default it takes ranges from histograms, which differ between FP32 and FP64 by more than rounding.
    """
    tools, quantizers = importlib.import_module(_PT2E), importlib.import_module(f"{_PT2E}.quantizer")
    x86 = importlib.import_module(f"{_PT2E}.quantizer.x86_inductor_quantizer")
    tensors = {"qscheme": torch.per_tensor_affine, "observer_or_fake_quant_ctr": tools.MinMaxObserver}
    inputs = quantizers.QuantizationSpec(dtype=torch.uint8, quant_min=0, quant_max=STEPS, **tensors)
    rows = {"qscheme": torch.per_channel_symmetric, "observer_or_fake_quant_ctr": tools.PerChannelMinMaxObserver}
    weights = quantizers.QuantizationSpec(dtype=torch.int8, quant_min=-128, quant_max=127, ch_axis=0, **rows)
    config = quantizers.QuantizationConfig(inputs, inputs, weights, None)
    return x86.X86InductorQuantizer().set_module_type_qconfig(nn.Linear, config)


def _pruned(graph: GraphModule) -> GraphModule:
    """Removes the FP32 weights that conversion keeps next to the int8 ones, and that no operator reads."""
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in graph.named_parameters() if name not in read]:
        owner, _, own = name.rpartition(".")
        delattr(graph.get_submodule(owner), own)
    return graph


TECHNIQUES: tuple[Technique, ...] = (ExportedInt8(), Lowered())
