"""Quantization of linear layers, forward only: what all variants share, and int8 by torch.ao.quantization."""

from __future__ import annotations

import importlib.util
import warnings
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import ProfilerLog, operators
from accelcheck.techniques.quantization.emulation import (
    DynamicRange,
    EmulatedLinear,
    FixedRange,
    Quantizer,
    calibrate,
    is_linear,
    replaced,
    twin,
)
from accelcheck.techniques.quantization.footprint import smaller_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log, Operator
    from accelcheck.workloads.base import Program, Workload
    from accelcheck.workloads.probes import Probe

ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")
"""The int8 engines that torch has; which of them a build and a processor have, torch.backends.quantized says."""

CALIBRATED_STEPS = 127
"""``quant_max`` of torch.ao's default activation observer: 7 bits, which no engine saturates on."""


class Holder(nn.Module):
    """Holds a module: conversions replace children alone, and the module may be a linear layer itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class Quantized(Technique):
    """What all variants share: they quantize a copy of the module, and promise the storage dtype around the grid."""

    family = "quantization"
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    requires = frozenset({"linear"})
    # An error of the size of a quantum takes another branch: no emulation can follow it.
    excludes = frozenset({"branching"})
    bakes = True

    def admits(self, probe: Probe) -> bool:
        """A grid has no NaN, no infinity and no subnormal numbers, and no room beyond its calibration."""
        return probe.name in {"zeros", "ones", "one-hot", "powers", "channels", "slice"}

    def precision(self, dtype: str) -> str:
        """That of the arithmetic around the grid: the oracle's emulation carries the quantization."""
        return dtype

    @abstractmethod
    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """The module, quantized: `module` is a `Holder` of a copy, and may be changed."""

    @abstractmethod
    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """See the base class; every variant has its own."""

    @property
    @abstractmethod
    def oracle(self) -> str:
        """Name of the scheme."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Quantize from the parameters as they are. Static variants calibrate on `program.inputs`: the judged ones."""
        del mode, device
        with deprecations_silenced():
            program.call = self.quantized(Holder(twin(program.module)), program.inputs)


class Replacing(Quantized):
    """A variant with layers of its own in place of linear ones. They hold their quantized weight as ``weight``.

    Attributes:
        workloads: Those that it is tried on, by name.
        layer: Type of the layers.
        stored: Dtype of their weights.
        action: What the judged run does with a weight once, in words for evidence.
    """

    workloads: frozenset[str]
    layer: type[nn.Module]
    stored: torch.dtype
    action: str

    @abstractmethod
    def make(self, linear: nn.Linear) -> nn.Module:
        """A layer in place of a linear one, whose bias it uses."""

    @abstractmethod
    def exactly(self, linear: nn.Linear) -> nn.Module:
        """What that layer computes, in FP64."""

    @abstractmethod
    def taken(self, operator: Operator) -> bool:
        """Whether an operator of the judged run is what `action` says."""

    def accepts(self, workload: Workload) -> bool:
        return super().accepts(workload) and workload.name in self.workloads

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        return replaced(module, self.make)

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        return replaced(twin(module), self.exactly)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del mode, device
        wanted = count(program.module, is_linear)
        layers = [layer for layer in modules(program.call) if isinstance(layer, self.layer)]
        left = count(called(program.call), is_linear)
        runs = operators(log).having(self.taken)
        held = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
        yield Evidence(f"linear layers converted = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        yield Evidence("linear layers left as they were = 0", left, engaged=left == 0)
        yield Evidence(f"{self.action} >= {wanted}", runs, engaged=runs >= wanted >= 1)
        yield stored_as(str(self.stored), (layer.get_buffer("weight").dtype for layer in layers))
        yield from sizes(program.module, called(program.call), held)


class Engine(Quantized):
    """A variant of torch.ao.quantization, on one of its engines.

    Args:
        engine: One of `ENGINES`, or None for the one that torch chose.
    """

    source = "https://docs.pytorch.org/docs/stable/quantization.html"
    watch = ProfilerLog
    scheme: str
    event: str
    """The operator that the profiler must see."""
    converted: type[nn.Module]

    def __init__(self, engine: str | None = None) -> None:
        self.asked = engine
        self.name = self.scheme if engine is None else f"{self.scheme}-{engine}"
        # The default engine is one of the others: once more by its name only in a standard run.
        self.level = 1 if engine is None else 2
        self._held = ExitStack()

    @property
    def engine(self) -> str:
        """The engine that is used here."""
        return self.asked or str(torch.backends.quantized.engine)

    def capability(self, device: Device) -> Capability:
        declared = self.needs(device, "quantized-engine")
        if not declared.ok:
            return declared
        if importlib.util.find_spec("torch.ao.quantization") is None:
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no torch.ao.quantization")
        supported = torch.backends.quantized.supported_engines
        if self.engine not in supported or self.engine == "none":
            return unavailable(
                Code.WRONG_BUILD, f"engine {self.engine!r} is not among this torch's: {', '.join(sorted(supported))}"
            )
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self._held.enter_context(engine_set(self.engine))
        super().prepare(program, mode, device)

    def finish(self) -> None:
        self._held.close()

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del mode, device
        wanted = count(program.module, is_linear)
        layers = [layer for layer in modules(program.call) if isinstance(layer, self.converted)]
        left = count(called(program.call), is_linear)
        runs = log.count(self.event)
        active = torch.backends.quantized.engine
        weights: list[torch.Tensor] = [layer.weight() for layer in layers]  # type: ignore[operator]  # a method there
        yield Evidence(f"linear layers converted = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        yield Evidence("linear layers left in floating point = 0", left, engaged=left == 0)
        yield Evidence(f"{self.event} events >= {wanted}", runs, engaged=runs >= wanted >= 1)
        yield Evidence(f"engine is {self.engine}", active, engaged=active == self.engine)
        yield stored_as("torch.qint8", (weight.dtype for weight in weights))
        yield from sizes(program.module, called(program.call), sum(weight.int_repr().nbytes for weight in weights))


class DynamicInt8(Engine):
    """Weights quantized ahead with one scale a layer, activations on the fly with one scale a tensor."""

    scheme = "int8-dynamic"
    promise = "Linear layers multiply int8 weights with activations quantized as they come; results are FP32."
    event = "quantized::linear_dynamic"

    @property
    def converted(self) -> type[nn.Module]:  # type: ignore[override]  # importing it takes a second: when used
        """The quantized layer's type."""
        from torch.ao.nn.quantized.dynamic import Linear

        return Linear

    @property
    def steps(self) -> int:
        """torch.ao asks for ``reduce_range``; qnnpack ignores it, as its own warning says (qlinear_dynamic.cpp)."""
        return 255 if self.engine == "qnnpack" else 127

    @property
    def oracle(self) -> str:
        return f"int8-dynamic-{self.steps}"

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        from torch.ao.quantization import quantize_dynamic

        out: nn.Module = quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8, inplace=True)  # type: ignore[no-untyped-call]  # torch.ao is untyped
        return out

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs

        def make(linear: nn.Linear) -> nn.Module:
            return EmulatedLinear(linear, dim=None, before=Quantizer(DynamicRange(self.steps), 0, 255))

        return replaced(twin(module), make)


class StaticInt8(Engine):
    """Weights, activations and outputs with fixed scales, calibrated on the judged run's inputs.

    Each linear layer is wrapped on its own, so that any module has a quantized form. Calibration inputs are the judged
    ones because the oracle must find the same ranges from what it is given.
    """

    scheme = "int8-static"
    promise = "Linear layers take and give int8 with scales fixed by calibration; between layers all is FP32."
    event = "quantized::linear"

    @property
    def converted(self) -> type[nn.Module]:  # type: ignore[override]  # importing it takes a second: when used
        """The quantized layer's type."""
        from torch.ao.nn.quantized import Linear

        return Linear

    @property
    def _per_channel(self) -> bool:
        return self.engine != "qnnpack"

    @property
    def oracle(self) -> str:
        return "int8-static-per-channel" if self._per_channel else "int8-static-per-tensor-integer-bias"

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        from torch.ao import quantization as ao

        qconfig = ao.default_per_channel_qconfig if self._per_channel else ao.default_qconfig

        def wrap(linear: nn.Linear) -> nn.Module:
            wrapper = ao.QuantWrapper(linear)
            wrapper.qconfig = qconfig  # type: ignore[assignment]  # nn.Module declares attributes as tensors or modules
            return wrapper

        prepared = ao.prepare(replaced(module, wrap).eval(), inplace=True)  # type: ignore[no-untyped-call]  # torch.ao is untyped
        with torch.no_grad():
            prepared(*inputs)
        out: nn.Module = ao.convert(prepared, inplace=True)  # type: ignore[no-untyped-call]  # as above
        return out

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        copied = twin(module)
        seen = calibrate(copied, inputs)

        def make(linear: nn.Linear) -> nn.Module:
            ranges = seen[linear]
            return EmulatedLinear(
                linear,
                dim=-1 if self._per_channel else None,
                before=Quantizer(FixedRange(ranges.low_in, ranges.high_in, CALIBRATED_STEPS), 0, 255),
                after=Quantizer(FixedRange(ranges.low_out, ranges.high_out, CALIBRATED_STEPS), 0, 255),
                integer_bias=not self._per_channel,
            )

        return replaced(copied, make)


def count(module: nn.Module, test: Callable[[nn.Module], bool]) -> int:
    """How many places in a module hold a submodule that passes a test; one that is used twice counts twice."""
    return sum(1 for _, part in module.named_modules(remove_duplicate=False) if test(part))


@contextmanager
def engine_set(engine: str) -> Iterator[None]:
    """Another quantized engine for a while."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@contextmanager
def deprecations_silenced() -> Iterator[None]:
    """torch.ao.quantization's deprecation, and its advice on observers, are known: see the technique's status."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*reduce_range.*", category=UserWarning)
        # torch 2.13 deprecates the quantized dtypes as well (pytorch#184982).
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*", category=UserWarning)
        yield


def called(call: Any) -> nn.Module:
    """A program's call as the quantized module that it must be.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(call, nn.Module):
        raise TypeError(f"expected the quantized module as the program's call, got {type(call).__name__}")
    return call


def modules(call: Any) -> Iterable[nn.Module]:
    """All places of the quantized module that hold a submodule."""
    return (part for _, part in called(call).named_modules(remove_duplicate=False))


def stored_as(wanted: str, found: Iterable[torch.dtype]) -> Evidence:
    """Whether weights have one dtype, given as its text."""
    seen = sorted({str(dtype) for dtype in found})
    return Evidence(f"dtype of the weights is {wanted}", ", ".join(seen) or "no weights", engaged=seen == [wanted])


def sizes(
    plain: nn.Module, quantized: nn.Module, after: int, converted: Callable[[nn.Module], bool] = is_linear
) -> Iterator[Evidence]:
    """In memory, and in a file, against FP32.

    Args:
        plain: The module as it was.
        quantized: What became of it.
        after: Bytes of the quantized weights.
        converted: Tells the layers of `plain` whose weights these are.
    """
    parts = plain.named_modules(remove_duplicate=False)
    before = sum(4 * part.weight.numel() for _, part in parts if isinstance(part, nn.Linear) and converted(part))
    yield Evidence(
        "bytes of the weights fall from FP32's by half or more", f"{before} -> {after}", engaged=0 < after <= before / 2
    )
    yield smaller_file(plain, quantized, before)


TECHNIQUES: tuple[Technique, ...] = tuple(
    variant(engine) for variant in (DynamicInt8, StaticInt8) for engine in (None, *ENGINES)
)
