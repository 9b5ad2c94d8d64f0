"""OpenVINO on the CPU, in FP32: a converted model, and the backend ``openvino`` of ``torch.compile``.

On processors with bfloat16 units OpenVINO computes FP32 models in bfloat16 by default. Each ``Core`` installs a signal
stack for the thread. When several are destroyed, the last one may reinstall a stack that has been freed, and the next
signal then kills the process; hence `signal_stack_kept`.
"""

import ctypes
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.quiet import copied_trees
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.packages import installed
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import REGION, Compilation, resolved_backend
from accelcheck.techniques.compilation.conversion import RUNTIME_EARLY, Converted, RuntimeConversion
from accelcheck.techniques.observe import Log, at_least, exactly, none_of
from accelcheck.workloads.base import Program, flatten

LOWER = re.compile(r".*_(bf16|f16|i8|u8)")
"""Pattern of the CPU plugin's kernel types that compute in less than FP32, such as ``brgconv_avx512_bf16``."""
EIGHT = frozenset({"i8", "u8"})
PRODUCTS = frozenset({"Convolution", "Deconvolution", "FullyConnected", "MatMul", "RNNCell", "RNNSeq"})
"""Node types whose kernels of eight bits would be quantized ones."""
PACKAGES: Mapping[str, str] = MappingProxyType({"openvino": "pip install 'accelcheck[openvino]'"})


def openvino_capability(device: Device) -> Capability:
    """Tells whether OpenVINO can compute on the device's tensors, and imports with this version of torch."""
    if not device.has("host"):
        return unsupported(Code.NO_BACKEND, f"OpenVINO takes tensors in host memory, not {device.name}'s")
    if installed("openvino"):
        try:
            openvino()
        except (ImportError, AttributeError, RuntimeError) as error:
            return unavailable(Code.IMPORT_FAILED, f"openvino does not import: {error}", PACKAGES["openvino"])
    return SUPPORTED


def openvino() -> Any:
    """Imports the package ``openvino`` with its telemetry disabled."""
    # Its converter reports each use to its vendor, unless the package for telemetry raises ImportError, as None does.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return importlib.import_module("openvino")


class Model(Converted):
    """Model that OpenVINO converts from an exported program and compiles for the CPU, with one inference request."""

    kind = "compiled model"

    def __init__(self, program: Program) -> None:
        package = openvino()
        exported = torch.export.export(program.module, program.inputs)
        with copied_trees():
            model = package.convert_model(exported)
        self.compiled = package.Core().compile_model(model, "CPU", properties())
        self.request = self.compiled.create_infer_request()
        self.structure = exported.call_spec.out_spec
        names = exported.graph_signature.user_inputs
        fed = [port.get_any_name() for port in self.compiled.inputs]
        # An input that the graph does not use may be left out.
        self.places = [names.index(name) for name in fed] if set(fed) <= set(names) else range(len(fed))
        super().__init__(program.module, self._run)

    def _run(self, *inputs: Any) -> Any:
        results = self.request.infer([inputs[place].contiguous().numpy() for place in self.places])
        return pytree.tree_unflatten([torch.from_numpy(results[out]) for out in self.compiled.outputs], self.structure)

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        yield from ran([self.request])


class OpenVino(RuntimeConversion):
    """``openvino.convert_model``, ``compile_model`` and a synchronous inference request."""

    name = "openvino"
    family = "openvino"
    promise = "OpenVINO, set to FP32, computes from the converted model what torch computes."
    source = "https://docs.openvino.ai/2026/openvino-workflow/model-preparation/convert-model-pytorch.html"
    level = 2
    early = RUNTIME_EARLY
    packages = PACKAGES
    capability = staticmethod(openvino_capability)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.held.enter_context(signal_stack_kept())
        super().prepare(program, mode, device)

    def converted(self, program: Program, device: Device) -> Model:
        try:
            return Model(program)
        except Exception as error:
            # The class is that of a package that is imported late; the text, that of its plugin for the CPU.
            if type(error).__name__ != "OpConversionFailure" and "Unsupported operation of type" not in str(error):
                raise
            reason = f"OpenVINO cannot convert the module: {str(error).strip().splitlines()[-1].lstrip('- ')}"
            raise Unsupported(unsupported(Code.NO_FEATURE, reason)) from error


class OverwriteCheck:
    """Wraps a compiled module, and counts the calls that have `overwritten` the result of the previous one."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.overwritten = 0
        self._last: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *inputs: Any) -> Any:
        out = self.run(*inputs)
        changed = [not torch.allclose(t, was, rtol=0.0, atol=0.0, equal_nan=True) for t, was in self._last]
        self.overwritten += any(changed)
        self._last = [(tensor, tensor.clone()) for _, tensor in flatten(out)]
        return out


class OpenVinoCompile(Compilation):
    """``torch.compile(backend="openvino")``: OpenVINO runs the parts of the graph that it supports, torch the others.

    Uses the option ``aot_autograd``, which gradients need; without it, convolutions and transformers fail with torch
    2.13. The backend falls back silently to inductor for a graph that it cannot convert, and to eager for a part that
    it cannot run; `evidence` checks both.
    """

    name = "openvino-compile"
    family = "openvino"
    promise = "Parts of a graph captured by torch.compile, run by OpenVINO in FP32, compute what the module computes."
    source = "https://docs.openvino.ai/2026/openvino-workflow/torch-compile.html"
    level = 2
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.ACCURACY})
    packages = PACKAGES
    capability = staticmethod(openvino_capability)
    # No attention alone, which the backend leaves to torch, so that OpenVINO would run nothing.
    workloads = frozenset({"elementwise-5", "mlp", "cnn", "transformer-block", "digits-mlp"})

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        self.held.enter_context(signal_stack_kept())
        self.held.enter_context(registered())
        options: dict[str, Any] = {"device": "CPU", "aot_autograd": True, "config": properties()}
        program.call = OverwriteCheck(torch.compile(program.module, backend="openvino", dynamic=False, options=options))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        call = program.call
        if not isinstance(call, OverwriteCheck):
            yield Evidence("the call is a compiled module", type(call).__name__, engaged=False)
            return
        used = resolved_backend(call.run)
        yield Evidence("backend is openvino", used, engaged=used == "openvino")
        yield at_least("compiled regions entered", log.count(REGION))
        executor = _dynamo("execute")
        if executor.partitioned_modules and not executor.req_cache:
            raise Unsupported(unsupported(Code.NO_EFFECT, "OpenVINO takes no part of the graph: torch runs all of it"))
        yield from ran([*executor.req_cache.values()])
        graphs = [*executor.partitioned_modules.values()]
        fallen = [bool(part.perm_fallback) for g in graphs for part in g.modules() if hasattr(part, "perm_fallback")]
        yield exactly(f"of {len(fallen)} parts run by eager after all", sum(fallen), 0)
        left = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
        # For information: nothing is promised about how many operators OpenVINO runs.
        yield Evidence("operators left to torch (any number)", ", ".join(sorted(left)) or 0, engaged=True)
        yield exactly("results overwritten by a later call", call.overwritten, 0)


@contextmanager
def registered() -> Iterator[None]:
    """Registers OpenVINO's backend, with empty caches, inside the context; undoes all process-wide changes."""
    with warnings.catch_warnings():
        # From torch 2.13 on, the option has no effect except this warning.
        warnings.filterwarnings("ignore", message=".*inline_inbuilt_nn_modules", category=FutureWarning)
        with torch_names.dynamo_config.patch(inline_inbuilt_nn_modules=False):
            openvino()
            importlib.import_module("openvino.torch")
            _clear_caches()
            try:
                yield
            finally:
                _clear_caches()
                _dynamo("backend").openvino_options = {}  # otherwise later cases would use the options of the first


def ran(requests: list[Any]) -> Iterable[Evidence]:
    """Yields evidence from OpenVINO's profile of requests that ran with `properties`: devices, nodes and precision."""
    models = [request.get_compiled_model() for request in requests]
    places = sorted({str(place) for model in models for place in model.get_property("EXECUTION_DEVICES")})
    yield Evidence("execution devices are CPU", ", ".join(places) or "none", engaged=places == ["CPU"])
    hints = sorted({model.get_property("INFERENCE_PRECISION_HINT").to_string() for model in models})
    yield Evidence("resolved INFERENCE_PRECISION_HINT is f32", ", ".join(hints) or "none", engaged=hints == ["f32"])
    nodes = [node for request in requests for node in request.get_profiling_info()]
    executed = [(node.exec_type, node.node_type) for node in nodes if str(node.status).endswith(".EXECUTED")]
    yield at_least("nodes executed", len(executed))
    types = {port.get_element_type().to_string() for model in models for port in model.inputs}
    # Kernels of eight bits are right for integers of eight bits, and masks have eight bits except in contractions.
    short = {(kind, node) for kind, node in executed if (low := LOWER.fullmatch(kind)) and low[1] not in types & EIGHT}
    masks = "boolean" in types
    lower = sorted({kind for kind, node in short if not (masks and kind[-2:] in EIGHT and node not in PRODUCTS)})
    yield none_of("of them in less than FP32", lower)


def properties() -> dict[str, Any]:
    """Makes OpenVINO's configuration: FP32, torch's number of threads, and a profile of executed nodes."""
    return {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERF_COUNT": True}


def _clear_caches() -> None:
    executor = _dynamo("execute")
    executor.clear_caches()
    executor.req_cache.clear()  # not cleared by the line above


def _dynamo(name: str) -> Any:
    return importlib.import_module(f"openvino.frontend.pytorch.torchdynamo.{name}")


class SignalStack(ctypes.Structure):
    """Structure ``stack_t`` of Linux."""

    _fields_: ClassVar = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


def signal_stack(new: SignalStack | None = None) -> SignalStack:
    """Returns the alternate signal stack of this thread, and replaces it by `new` unless that is None. Linux only."""
    was = SignalStack()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaltstack(ctypes.byref(new) if new is not None else None, ctypes.byref(was)):
        raise OSError(ctypes.get_errno(), f"sigaltstack: {os.strerror(ctypes.get_errno())}")
    return was


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Restores the signal stack at the end of the context, if a library has replaced it. No effect except on Linux."""
    before = signal_stack() if sys.platform == "linux" else None
    try:
        yield
    finally:
        if before is not None:
            signal_stack(before)


TECHNIQUES: tuple[Technique, ...] = (OpenVino(), OpenVinoCompile())
