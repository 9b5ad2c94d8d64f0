"""int8 quantization of linear layers: torch.ao.quantization (dynamic and static) and torchao. Forward only."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelcheck.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.emulation import (
    DynamicRange,
    EmulatedLinear,
    FixedRange,
    Quantizer,
    calibrate,
    is_linear,
    per_token,
    replaced,
    twin,
)
from accelcheck.techniques.observe import ProfilerLog, operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program
    from accelcheck.workloads.probes import Probe

ENGINES = ("x86", "fbgemm", "onednn", "qnnpack")
"""The int8 engines that torch has; which of them a build and a processor have, torch.backends.quantized says."""

CALIBRATED_STEPS = 127
"""``quant_max`` of torch.ao's default activation observer: 7 bits, which no engine saturates on."""

AO_PACKAGE = "pip install 'accelcheck[torchao]'"


class Holder(nn.Module):
    """Holds a module: conversions replace children alone, and the module may be a linear layer itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.eval()

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class Int8(Technique):
    """What all int8 variants share: they quantize a copy of the module, and promise FP32 around the integers."""

    family = "quantization"
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    requires = frozenset({"linear"})
    # An error of the size of a quantum takes another branch: no emulation can follow it.
    excludes = frozenset({"branching"})
    bakes = True

    def admits(self, probe: Probe) -> bool:
        """An integer grid has no NaN, no infinity and no subnormal numbers, and no room beyond its calibration."""
        return probe.name in {"zeros", "ones", "one-hot", "powers", "channels", "slice"}

    def precision(self, dtype: str) -> str:
        """That of the arithmetic around the integers: the oracle's emulation carries the quantization."""
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


class Engine(Int8):
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
        layers = [layer for layer in _modules(program.call) if isinstance(layer, self.converted)]
        left = count(_module(program.call), is_linear)
        runs = log.count(self.event)
        active = torch.backends.quantized.engine
        weights: list[torch.Tensor] = [layer.weight() for layer in layers]  # type: ignore[operator]  # a method there
        yield Evidence(f"linear layers converted = {wanted} >= 1", len(layers), engaged=len(layers) == wanted >= 1)
        yield Evidence("linear layers left in floating point = 0", left, engaged=left == 0)
        yield Evidence(f"{self.event} events >= {wanted}", runs, engaged=runs >= wanted >= 1)
        yield Evidence(f"engine is {self.engine}", active, engaged=active == self.engine)
        yield _dtypes("torch.qint8", (weight.dtype for weight in weights))
        yield _bytes(program, sum(weight.int_repr().nbytes for weight in weights))


class Dynamic(Engine):
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


class Static(Engine):
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


class TorchAO(Int8):
    """torchao's ``quantize_`` with an int8 configuration, version 2 (weights are `Int8Tensor`s), one scale a channel."""

    source = "https://docs.pytorch.org/ao/stable/api_reference/api_ref_quantization.html"
    config: str
    """Name of the configuration in torchao.quantization."""

    def capability(self, device: Device) -> Capability:
        del device
        return torchao_capability()

    def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        torchao = importlib.import_module("torchao.quantization")
        # Left alone, `quantize_` changes inductor's configuration for the rest of the process.
        torchao.quantize_(module, getattr(torchao, self.config)(set_inductor_config=False))
        return module

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del mode, device
        wanted = count(program.module, is_linear)
        weights = [
            layer.weight for layer in _modules(program.call) if isinstance(layer, nn.Linear) and is_linear(layer)
        ]
        kinds = [type(weight.data).__name__ for weight in weights]
        tensors = [weight for weight, kind in zip(weights, kinds, strict=True) if kind == "Int8Tensor"]
        integers: list[torch.Tensor] = [weight.qdata for weight in tensors]  # type: ignore[attr-defined]  # Int8Tensor's own
        yield Evidence(
            f"linear layers with an Int8Tensor weight = {wanted} >= 1",
            len(tensors),
            engaged=len(tensors) == wanted >= 1,
        )
        yield _dtypes("torch.int8", (integer.dtype for integer in integers))
        yield _bytes(program, sum(integer.nbytes for integer in integers))
        yield self._ran(log, wanted)

    @abstractmethod
    def _ran(self, log: Log, wanted: int) -> Evidence:
        """What the judged run shows: `wanted` layers should have computed with int8."""


class TorchAODynamic(TorchAO):
    """Both operands int8: activations with a scale a token, computed as they come."""

    name = "int8-torchao-dynamic"
    promise = "Linear layers multiply int8 activations (a scale a token) with int8 weights (a scale a channel)."
    config = "Int8DynamicActivationInt8WeightConfig"
    oracle = "int8-token-channel"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        return replaced(
            twin(module), lambda linear: EmulatedLinear(linear, before=Quantizer(per_token, low=-128, high=127))
        )

    def _ran(self, log: Log, wanted: int) -> Evidence:
        runs = operators(log).having(lambda op: op.name == "aten::_int_mm" and op.takes(torch.int8))
        return Evidence(f"int8 matrix products (aten::_int_mm) >= {wanted}", runs, engaged=runs >= wanted >= 1)


class TorchAOWeightOnly(TorchAO):
    """Weights int8, activations as they are."""

    name = "int8-torchao-weight-only"
    promise = "Linear layers keep int8 weights (a scale a channel); activations stay in floating point."
    config = "Int8WeightOnlyConfig"
    oracle = "int8-weight-channel"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        del inputs
        return replaced(twin(module), EmulatedLinear)

    def _ran(self, log: Log, wanted: int) -> Evidence:
        runs = operators(log).having(lambda op: op.name == "aten::_to_copy" and op.takes(torch.int8))
        return Evidence(f"int8 weights widened for a product >= {wanted}", runs, engaged=runs >= wanted >= 1)


@cache
def torchao_capability() -> Capability:
    """Whether torchao is here, imports with this torch, and has the int8 scheme that the oracle emulates."""
    if importlib.util.find_spec("torchao") is None:
        return unavailable(Code.NO_PACKAGE, "torchao is not installed", AO_PACKAGE)
    pair = f"torchao {importlib.metadata.version('torchao')} with torch {torch.__version__}"
    try:
        quantization = importlib.import_module("torchao.quantization")
    except (ImportError, AttributeError, RuntimeError) as error:
        return unavailable(Code.WRONG_VERSION, f"{pair} does not import: {error}", "install versions that pair")
    for name in (TorchAODynamic.config, TorchAOWeightOnly.config):
        config = getattr(quantization, name, None)
        versions = [] if config is None else [field.default for field in fields(config) if field.name == "version"]
        if versions != [2]:
            return unavailable(Code.WRONG_VERSION, f"{pair}: {name} is not of version 2", AO_PACKAGE)
    return SUPPORTED


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


def _module(call: Any) -> nn.Module:
    if not isinstance(call, nn.Module):
        raise TypeError(f"expected the quantized module as the program's call, got {type(call).__name__}")
    return call


def _modules(call: Any) -> Iterable[nn.Module]:
    return (part for _, part in _module(call).named_modules(remove_duplicate=False))


def _dtypes(wanted: str, dtypes: Iterable[torch.dtype]) -> Evidence:
    seen = sorted({str(dtype) for dtype in dtypes})
    return Evidence(f"dtype of the weights is {wanted}", ", ".join(seen) or "no weights", engaged=seen == [wanted])


def _bytes(program: Program, after: int) -> Evidence:
    parts = program.module.named_modules(remove_duplicate=False)
    before = sum(part.weight.nbytes for _, part in parts if isinstance(part, nn.Linear) and is_linear(part))
    return Evidence("bytes of the weights fall", f"{before} -> {after}", engaged=0 < after < before)


TECHNIQUES: tuple[Technique, ...] = (
    *(variant(engine) for variant in (Dynamic, Static) for engine in (None, *ENGINES)),
    TorchAODynamic(),
    TorchAOWeightOnly(),
)
