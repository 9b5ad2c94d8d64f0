"""Base classes of quantized linear layers, forward only, and int8 by torch.ao.quantization."""

import importlib.util
import io
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.layouts import entries
from accelcheck.techniques.base import Holding, Technique
from accelcheck.techniques.observe import Log, Operator, ProfilerLog, exactly, operators
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.emulation import FixedRange, Quantizer, eval_copy, is_linear, replaced
from accelcheck.workloads.base import Program
from accelcheck.workloads.dispatch import layer_by_layer
from accelcheck.workloads.probes import Probe

ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")
"""Int8 engines of torch. ``torch.backends.quantized.supported_engines`` lists those of a build and processor."""
CALIBRATED_STEPS = 127
"""``quant_max`` of torch.ao's default activation observer: 7 bits, with which no engine saturates."""


class Holder(nn.Module):
    """Module with one child, since conversions only replace children, and the child may be a linear layer itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class Quantized(Technique):
    """Base class of techniques that quantize a copy of the module; other arithmetic is in the storage dtype."""

    family = "quantization"
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    requires = frozenset({"linear"})
    # An error of one quantum may take another branch, which no emulation can follow.
    excludes = frozenset({"branching"})
    bakes = True

    def admits(self, probe: Probe) -> bool:
        """Refuses NaN, infinities, subnormal numbers and values beyond the calibrated range, which integers lack."""
        return probe.name in {"zeros", "ones", "one-hot", "powers", "channels", "slice"}

    @abstractmethod
    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """Quantizes `module`, a `Holder` of a copy, in place or not; returns the quantized module."""

    @abstractmethod
    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """Makes the FP64 emulation, see `Technique.emulate`. Every variant must have its own."""

    @property
    @abstractmethod
    def oracle(self) -> str:
        """Name of the quantization scheme, see `Technique.oracle`."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Quantizes the present parameters. Static variants calibrate on `program.inputs`, the judged ones."""
        with deprecations_silenced():
            program.call = self.quantized(Holder(eval_copy(program.module)), program.inputs)
        program.around = layer_by_layer  # the fast path of attention takes the parameters of layers that are replaced


class LayerByLayer(Quantized):
    """Base class of techniques that quantize each linear layer by itself."""

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """Makes the FP64 emulation, see `Technique.emulate`."""
        return replaced(eval_copy(module), self.emulated_layer)

    @abstractmethod
    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        """Makes the FP64 emulation of one linear layer."""


class Replacing(LayerByLayer):
    """Base class of techniques that replace linear layers by their own `layer`, with a ``weight`` of dtype `stored`.

    `action` is the operation that a run does once with each weight, in words for evidence.
    """

    layer: type[nn.Module]
    stored: torch.dtype
    action: str
    operator = "aten::_to_copy"

    def make(self, linear: nn.Linear) -> nn.Module:
        """Makes the layer that replaces `linear` and shares its bias."""
        return self.layer(linear)

    def is_action(self, operator: Operator) -> bool:
        """Returns whether an operator of the judged run is the `action`: by default, the one named `operator`."""
        return operator.name == self.operator and operator.takes(self.stored)

    def runs(self, log: Log) -> int:
        """Counts the `action` in the log of a judged run."""
        return operators(log).having(self.is_action)

    def holds(self, layer: nn.Module) -> list[torch.Tensor]:
        """Lists what a layer holds in place of the weight, which comes first."""
        return [layer.get_buffer("weight"), *(part for name, part in layer.named_buffers() if name != "weight")]

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return replaced(module, self.make)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = count(program.module, is_linear)
        layers = [layer for layer in modules(program.call) if isinstance(layer, self.layer)]
        runs = self.runs(log)
        held = [self.holds(layer) for layer in layers]
        yield Evidence(f"linear layers converted = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        yield exactly("linear layers left as they were", count(as_module(program.call), is_linear), 0)
        yield Evidence(f"{self.action} >= {wanted}", runs, engaged=runs >= wanted >= 1)
        yield stored_as(str(self.stored), (parts[0].dtype for parts in held))
        yield from sizes(program.module, as_module(program.call), sum(part.nbytes for parts in held for part in parts))


class Engine(Holding, Quantized):
    """Variant of torch.ao.quantization with one of the `ENGINES`, or with torch's default for None."""

    source = "https://docs.pytorch.org/docs/stable/quantization.html"
    watch = ProfilerLog
    scheme: str
    event: str
    """Name of the operator that the profiler must record."""
    layer_module: str
    """Name of the Python module with the quantized layers, whose import takes a second."""

    def __init__(self, engine: str | None = None) -> None:
        self.asked = engine
        self.name = self.scheme if engine is None else f"{self.scheme}-{engine}"
        # The default engine is one of the others, which need not run again by name at level 1.
        self.level = 1 if engine is None else 2

    @property
    def engine(self) -> str:
        """Name of the engine that is used on this machine."""
        return self.asked or str(torch.backends.quantized.engine)

    def capability(self, device: Device) -> Capability:
        if not (declared := self.needs(device, "quantized-engine")).ok:
            return declared
        if importlib.util.find_spec("torch.ao.quantization") is None:
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no torch.ao.quantization")
        supported = torch.backends.quantized.supported_engines
        if self.engine not in supported or self.engine == "none":
            reason = f"this torch build lacks the engine {self.engine!r}; it has {', '.join(sorted(supported))}"
            return unavailable(Code.WRONG_BUILD, reason)
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.held.enter_context(engine_set(self.engine))
        super().prepare(program, mode, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = count(program.module, is_linear)
        converted = importlib.import_module(self.layer_module).Linear
        layers = [layer for layer in modules(program.call) if isinstance(layer, converted)]
        runs = log.count(self.event)
        active = torch.backends.quantized.engine
        weights: list[torch.Tensor] = [layer.weight() for layer in layers]
        yield Evidence(f"linear layers converted = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        yield exactly("linear layers left in floating point", count(as_module(program.call), is_linear), 0)
        yield Evidence(f"{self.event} events >= {wanted}", runs, engaged=runs >= wanted >= 1)
        yield Evidence(f"engine is {self.engine}", active, engaged=active == self.engine)
        yield stored_as("torch.qint8", (weight.dtype for weight in weights))
        yield from sizes(program.module, as_module(program.call), sum(weight.int_repr().nbytes for weight in weights))


class DynamicInt8(LayerByLayer, Engine):
    """Weights quantized ahead of time with one scale per layer, activations at run time with one scale per tensor."""

    scheme = "int8-dynamic"
    promise = "Linear layers multiply int8 weights by activations quantized at run time; results are FP32."
    event = "quantized::linear_dynamic"
    layer_module = "torch.ao.nn.quantized.dynamic"

    @property
    def steps(self) -> int:
        """Steps of activation ranges: torch.ao sets ``reduce_range``, which qnnpack ignores (qlinear_dynamic.cpp)."""
        return 255 if self.engine == "qnnpack" else 127

    @property
    def oracle(self) -> str:
        return f"int8-dynamic-{self.steps}"

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        ao: Any = importlib.import_module("torch.ao.quantization")
        out: nn.Module = ao.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8, inplace=True)
        return out

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return emulation.EmulatedLinear(linear, dim=None, before=Quantizer(emulation.DynamicRange(self.steps), 0, 255))


class StaticInt8(Engine):
    """Weights, activations and outputs with fixed scales, calibrated on the inputs of the judged run.

    Each linear layer is wrapped separately, so that every module can be quantized. The oracle has no other inputs, and
    must find the same ranges.
    """

    scheme = "int8-static"
    promise = "Linear layers have int8 inputs and outputs with calibrated scales; everything between them is FP32."
    event = "quantized::linear"
    layer_module = "torch.ao.nn.quantized"

    @property
    def _per_channel(self) -> bool:
        return self.engine != "qnnpack"

    @property
    def oracle(self) -> str:
        return "int8-static-per-channel" if self._per_channel else "int8-static-per-tensor-integer-bias"

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        ao: Any = importlib.import_module("torch.ao.quantization")
        qconfig = ao.default_per_channel_qconfig if self._per_channel else ao.default_qconfig

        def wrap(linear: nn.Linear) -> nn.Module:
            wrapper: nn.Module = ao.QuantWrapper(linear)
            wrapper.qconfig = qconfig
            return wrapper

        prepared = ao.prepare(replaced(module, wrap).eval(), inplace=True)
        with torch.no_grad():
            prepared(*inputs)
        out: nn.Module = ao.convert(prepared, inplace=True)
        return out

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        copied = eval_copy(module)
        seen = emulation.calibrate(copied, inputs)

        def make(linear: nn.Linear) -> nn.Module:
            ranges = seen[linear]
            return emulation.EmulatedLinear(
                linear,
                dim=-1 if self._per_channel else None,
                before=Quantizer(FixedRange(ranges.low_in, ranges.high_in, CALIBRATED_STEPS), 0, 255),
                after=Quantizer(FixedRange(ranges.low_out, ranges.high_out, CALIBRATED_STEPS), 0, 255),
                integer_bias=not self._per_channel,
            )

        return replaced(copied, make)


def count(module: nn.Module, test: Callable[[nn.Module], bool]) -> int:
    """Counts the submodules that pass a test; one that is registered twice counts twice."""
    return sum(1 for _, part in module.named_modules(remove_duplicate=False) if test(part))


@contextmanager
def engine_set(engine: str) -> Iterator[None]:
    """Makes torch use this quantized engine inside the context."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@contextmanager
def deprecations_silenced() -> Iterator[None]:
    """Silences the warnings that torch.ao.quantization is deprecated, and its advice on observers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        # torch 2.13 deprecates the quantized dtypes as well (pytorch#184982).
        advice = ".*(reduce_range|quantized tensor creation functions).*"
        warnings.filterwarnings("ignore", message=advice, category=UserWarning)
        yield


def as_module(call: Any) -> nn.Module:
    """Returns a `Program.call` that is a module; raises a TypeError for any other."""
    if not isinstance(call, nn.Module):
        raise TypeError(f"expected the quantized module as the program's call, got {type(call).__name__}")
    return call


def modules(call: Any) -> Iterable[nn.Module]:
    """Lists all submodules of the quantized module; those that are registered twice come twice."""
    return (part for _, part in as_module(call).named_modules(remove_duplicate=False))


def stored_as(wanted: str, dtypes: Iterable[torch.dtype]) -> Evidence:
    """Makes evidence that all weights have the dtype `wanted`, such as ``torch.int8``."""
    seen = sorted({str(dtype) for dtype in dtypes})
    return Evidence(f"dtype of the weights is {wanted}", ", ".join(seen) or "no weights", engaged=seen == [wanted])


def sizes(
    plain: nn.Module, quantized: nn.Module, after: int, converted: Callable[[nn.Module], bool] = is_linear
) -> Iterator[Evidence]:
    """Yields evidence that `converted` weights take less than in FP32, `after` bytes, and the model a smaller file."""
    parts = plain.named_modules(remove_duplicate=False)
    before = sum(4 * part.weight.numel() for _, part in parts if isinstance(part, nn.Linear) and converted(part))
    claim = "bytes of the weights fall from FP32's by half or more"
    yield Evidence(claim, f"{before} -> {after}", engaged=0 < after <= before / 2)
    yield smaller_file(plain, quantized, before)


def on_disk(state: Mapping[str, Any]) -> tuple[int, int]:
    """Counts the bytes of the file that ``torch.save`` writes for a state, and those of tensors' elements in it."""
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        elements = sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
    return len(file.getvalue()), elements


def _tied(module: nn.Module) -> list[str]:
    """Names the weights of linear layers that other modules hold too, such as the table of a language model, once."""
    heads = {f"{name}.weight" for name, part in module.named_modules(remove_duplicate=False) if type(part) is nn.Linear}
    state = module.state_dict()
    others = {entries(value).data_ptr() for name, value in state.items() if name not in heads}
    tied = ((entries(value).data_ptr(), name) for name, value in state.items() if name in heads)
    return [*{address: name for address, name in tied if address in others}.values()]


def smaller_file(plain: nn.Module, quantized: nn.Module, weights: int) -> Evidence:
    """Makes evidence that elements take at least a third of the FP32 weights' bytes less in the quantized model's file.

    int8 saves three quarters of these bytes. torch.ao adds 16 bytes per channel, a quarter for channels with 16 inputs.
    Only elements are compared, because everything else in the file of a small model is as large as its weights. Unseen
    where torch.save cannot write tensors of the model's device.
    """
    full = {name: value.float() if value.is_floating_point() else value for name, value in plain.state_dict().items()}
    for name in _tied(plain):
        full[name] = full[name].clone()  # the table stays in the quantized model's file, whatever becomes of the head
    claim = f"bytes of elements in a file fall from FP32's by {weights // 3} (a third of the weights) or more"
    try:
        (file, before), (smaller, after) = on_disk(full), on_disk(quantized.state_dict())
    except RuntimeError as error:  # a device's storage may have no way to the CPU
        if all(value.device.type == "cpu" for value in full.values()):
            raise
        return Evidence.unseen(claim, f"torch.save: {type(error).__name__}: {str(error).splitlines()[0]}")
    told = f"{before} -> {after} (whole file {file} -> {smaller})"
    return Evidence(claim, told, engaged=before - after >= weights / 3 > 0)


TECHNIQUES: tuple[Technique, ...] = tuple(
    variant(engine) for variant in (DynamicInt8, StaticInt8) for engine in (None, *ENGINES)
)
