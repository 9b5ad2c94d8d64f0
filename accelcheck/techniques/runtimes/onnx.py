"""ONNX Runtime: the module is exported to ONNX and run by a session in place of torch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence
from accelcheck.core.files import scratch
from accelcheck.core.quiet import copied_trees, without
from accelcheck.devices.base import Device
from accelcheck.devices.packages import installed
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.conversion import RUNTIME_EARLY, Converted, RuntimeConversion
from accelcheck.techniques.observe import at_least, counted, none_of
from accelcheck.workloads.base import Program

PROVIDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "host": ("CPUExecutionProvider", {}),
    "hip": ("MIGraphXExecutionProvider", {}),
    "torch-cuda": ("CUDAExecutionProvider", {"use_tf32": 0}),  # default 1: products of FP32 tensors in TF32
}
"""Execution provider and its options, by feature of the device; the first that it has counts."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"tensor(float)": torch.float32, "tensor(double)": torch.float64}
    | {f"tensor({name})": getattr(torch, name) for name in "float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()}
)
"""Dtype of torch for each name of an element type in a session."""
SHAPE_TYPES = frozenset({"int64", "int32", "bool"})
"""Element types of tensors from which shapes are computed, in the spelling of profiles."""
MOST_DIMENSIONS = 100
"""Most elements of a tensor that belongs to a shape: ONNX Runtime's threshold for a small initializer."""


class OnnxRuntimeModule(Converted):
    """ONNX Runtime session that reads and writes the memory of torch's tensors.

    The module is exported for the sizes of the program's inputs, into a folder that also gets the profile. The
    execution provider named `provider` must run all nodes.
    """

    ran: list[OnnxNode] | None = None
    """Nodes, with the provider that ran each, once `evidence` has ended the session's profiler."""
    kind = "session"

    def __init__(self, program: Program, provider: str, options: Mapping[str, Any], folder: Path) -> None:
        runtime = importlib.import_module("onnxruntime")
        exported = torch.export.export(program.module, program.inputs)
        # The exporter names each operator of torchvision that is absent: the suite has none of them.
        absent = without("torch.onnx._internal.exporter._registration", "torchvision is not installed")
        with operators_listed_once(), copied_trees(), absent:
            model = torch.onnx.export(exported, dynamo=True, verbose=False)
        if model is None:
            raise TypeError("torch.onnx.export: expected an ONNX program, got nothing")
        path = folder / "model.onnx"
        model.save(str(path))
        settings = runtime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.enable_profiling = True
        settings.profile_file_prefix = str(folder / "profile")
        self.provider = provider
        self.session = runtime.InferenceSession(str(path), settings, providers=[(provider, dict(options))])
        self.structure = exported.call_spec.out_spec
        self.synchronize = program.synchronize
        super().__init__(program.module, self._run)

    def _run(self, *inputs: Any) -> Any:
        tensors = [value.contiguous() for value in inputs if isinstance(value, Tensor)]
        place = tensors[0].device
        binding = self.session.io_binding()
        for declared, tensor in zip(self.session.get_inputs(), tensors, strict=True):
            binding.bind_input(declared.name, *_memory(tensor))
        outs = []
        for declared in self.session.get_outputs():
            outs.append(torch.empty(declared.shape, dtype=DTYPES[declared.type], device=place))
            binding.bind_output(declared.name, *_memory(outs[-1]))
        # The session runs on its own stream, which does not wait for torch's.
        self.synchronize()
        self.session.run_with_iobinding(binding)
        return pytree.tree_unflatten(outs, self.structure)

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        first = str(self.session.get_providers()[0])
        yield Evidence(f"first execution provider is {self.provider}", first, engaged=first == self.provider)
        if self.ran is None:  # a session decides once which provider runs a node, and its profile can be ended once
            self.ran = nodes_of(Path(self.session.end_profiling()))
        elsewhere = [node for node in self.ran if node.provider != self.provider]
        yield at_least(f"nodes that {self.provider} ran", len(self.ran) - len(elsewhere))
        shapes = sum(node.computes_shapes for node in elsewhere)
        strays = Counter(f"{node.operator} on {node.provider}" for node in elsewhere if not node.computes_shapes)
        yield none_of("nodes that other providers ran, except for shapes on the CPU", counted(strays))
        yield Evidence("nodes that compute shapes on the CPU (any number)", shapes, engaged=True)


class OnnxRuntime(RuntimeConversion):
    """Exports with ``torch.onnx.export(dynamo=True)``, and runs with all of ONNX Runtime's graph optimizations."""

    name = "onnxruntime"
    family = "onnxruntime"
    promise = "ONNX Runtime computes from the exported graph what torch computes."
    source = "https://docs.pytorch.org/docs/stable/onnx_export.html"
    level = 2
    early = RUNTIME_EARLY | {"transformer-block"}
    packages = MappingProxyType(dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "pip install 'accelcheck[onnx]'"))

    def capability(self, device: Device) -> Capability:
        provider = _provider(device)
        if provider is None:
            return unsupported(Code.NO_BACKEND, f"ONNX Runtime has no execution provider for {device.name}'s tensors")
        if not all(installed(package) for package in self.packages):
            return SUPPORTED  # `answer` checks the packages next
        try:
            offered = importlib.import_module("onnxruntime").get_available_providers()
            importlib.import_module("onnxscript")
        except (ImportError, AttributeError, RuntimeError) as error:
            return unavailable(Code.IMPORT_FAILED, f"{error}", "install versions that pair with this torch")
        if provider[0] not in offered:
            reason = f"the installed onnxruntime offers {', '.join(offered)}, but not {provider[0]}"
            advice = "install the onnxruntime build for this device: onnxruntime-gpu, onnxruntime-migraphx"
            return unavailable(Code.WRONG_BUILD, reason, advice)
        return SUPPORTED

    def converted(self, program: Program, device: Device) -> OnnxRuntimeModule:
        provider = _provider(device)
        if provider is None:
            raise ValueError(f"{self.name}: no execution provider for {device.name}: ask `capability` first")
        folder = self.held.enter_context(tempfile.TemporaryDirectory(prefix="onnx-", dir=scratch()))
        return OnnxRuntimeModule(program, *provider, Path(folder))


@contextlib.contextmanager
def operators_listed_once() -> Iterator[None]:
    """Lets exports inside the context share the list of ONNX functions that implement torch's operators.

    The exporter parses the source of some 500 functions for each export, half of the time of a small one, to the same
    list. Nothing changes if a release of torch has it from elsewhere.
    """
    try:
        registration = importlib.import_module("torch.onnx._internal.exporter._registration")
    except ImportError:
        registration = None
    apis = getattr(registration, "onnxscript_apis", None)
    find: Callable[..., Sequence[Any]] | None = getattr(apis, "get_torchlib_ops", None)
    if find is None:
        yield
        return
    with mock.patch.object(apis, "get_torchlib_ops", functools.partial(_listed, find)):
        yield


@functools.cache
def _listed(find: Callable[..., Sequence[Any]], *arguments: Any) -> tuple[Any, ...]:
    return tuple(find(*arguments))


def _provider(device: Device) -> tuple[str, Mapping[str, Any]] | None:
    return next((provider for feature, provider in PROVIDERS.items() if device.has(feature)), None)


@dataclass(frozen=True)
class OnnxNode:
    """Node of the graph, such as ``MatMul``, that an execution provider ran.

    Each input and output is given as its shape by element type; there are none if they are absent from the profile.
    """

    operator: str
    provider: str
    inputs: Sequence[Mapping[str, Sequence[int]]] = ()
    outputs: Sequence[Mapping[str, Sequence[int]]] = ()

    @property
    def computes_shapes(self) -> bool:
        """True if it computes a shape on the CPU, where ONNX Runtime places such nodes on purpose.

        ``GetCpuPreferredNodes`` (onnxruntime/core/framework/fallback_cpu_capability.cc) moves nodes to the CPU that
        depend on small tensors there alone, beginning with the results of Shape and Size: copies would take longer.
        """
        if self.provider != "CPUExecutionProvider":
            return False
        # Shape and Size look at the size of their input alone.
        return _small(self.outputs) and (self.operator in {"Shape", "Size"} or _small(self.inputs))


def nodes_of(profile: Path) -> list[OnnxNode]:
    """Reads the nodes that ran, in order, from the profile that a session wrote."""
    seen = (event.get("args", {}) for event in json.loads(profile.read_text()) if event.get("cat") == "Node")
    return [
        OnnxNode(args["op_name"], args["provider"], args.get("input_type_shape", ()), args.get("output_type_shape", ()))
        for args in seen
        if "provider" in args
    ]


def _small(tensors: Sequence[Mapping[str, Sequence[int]]]) -> bool:
    """Returns whether these are known, and all as small as a shape: integers or booleans of at most one dimension."""
    return bool(tensors) and all(
        kind in SHAPE_TYPES and len(shape) <= 1 and math.prod(shape) <= MOST_DIMENSIONS
        for tensor in tensors
        for kind, shape in tensor.items()
    )


def _memory(tensor: Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
    """Returns device type, device number, element type, shape and address, the arguments of an IO binding."""
    # NumPy has no bfloat16: its number in ONNX's TensorProto.
    element = 16 if tensor.dtype is torch.bfloat16 else torch.empty(0, dtype=tensor.dtype).numpy().dtype
    address = tensor.data_ptr() or _NOWHERE.data_ptr()
    return tensor.device.type, tensor.device.index or 0, element, tuple(tensor.shape), address


_NOWHERE = torch.empty(1)
"""Memory for tensors without elements: a binding refuses the address 0."""


TECHNIQUES: tuple[Technique, ...] = (OnnxRuntime(),)
