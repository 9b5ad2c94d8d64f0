"""ONNX Runtime: evidence from sessions, capability, and, where its packages are installed, results."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fault_harness import FORWARD, failed, faults, passed, seeded
from technique_harness import StubDevice, agrees, mlp, plain, run
from torch import Tensor, nn
from upstream_signatures import unlike_upstream

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.devices.base import Device
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.cuda import Cuda
from accelcheck.devices.rocm import Rocm
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.runtimes import onnx
from accelcheck.techniques.runtimes.onnx import (
    PROVIDERS,
    TECHNIQUES,
    OnnxNode,
    OnnxRuntime,
    OnnxRuntimeModule,
    nodes_of,
)
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload

(ONNX,) = TECHNIQUES
needs_packages = pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in ONNX.packages), reason=str(ONNX.packages)
)


class Two(nn.Module):
    """Takes integers, booleans and a plain number; returns a dictionary."""

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"picked": x[index], "masked": torch.where(mask, x, 0.0)}


def two() -> Problem:
    torch.manual_seed(0)
    # A transposed input, since sessions read dense memory.
    x = torch.randn(5, 6).t()
    return Problem(Two(), (x, torch.tensor([3, 1]), torch.rand(6, 5) > 0.5))


@needs_packages
def test_a_session_computes_the_module() -> None:
    agrees(ONNX, mlp)


@needs_packages
def test_an_export_says_nothing_of_torchvision_and_of_trees(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # to pytest's handler: torch has its own
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ONNX, two())
    assert [str(fault.message) for fault in caught if "LeafSpec" in str(fault.message)] == []
    assert "torchvision" not in caplog.text


@pytest.mark.slow
@needs_packages
def test_the_operators_that_the_exporter_knows_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = importlib.import_module("torch.onnx._internal.exporter._registration")
    real = registration.onnxscript_apis.get_torchlib_ops
    calls: list[int] = []

    def find() -> list[Any]:
        calls.append(1)
        return list(real())

    monkeypatch.setattr(registration.onnxscript_apis, "get_torchlib_ops", find)
    for _ in range(2):
        assert run(ONNX, mlp()).engaged
    assert len(calls) == 1
    assert registration.onnxscript_apis.get_torchlib_ops is find


@needs_packages
def test_structures_dtypes_and_strides_are_supported() -> None:
    ran = agrees(ONNX, two, tolerance=0.0)
    assert ran.result.keys() == {"out['picked']", "out['masked']"}


class Odd(nn.Module):
    """Returns a tensor without elements, one in a dtype that NumPy does not have, and one of bytes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"none": x[:0] * 2, "half": (x * 3).bfloat16(), "bytes": (x.abs() * 5).to(torch.uint8)}


@pytest.mark.slow
@needs_packages
def test_results_without_elements_and_in_any_dtype_are_bound() -> None:
    problem = Problem(Odd(), (torch.randn(4, 3),))
    ran, expected = run(ONNX, problem), plain(problem)
    assert ran.engaged, ran.missing()
    assert ran.result.keys() == expected.keys()
    for path, out in expected.items():
        torch.testing.assert_close(ran.result[path], out, rtol=0.0, atol=0.0)


@needs_packages
def test_a_session_keeps_its_weights() -> None:
    program = Program.of(mlp())
    expected = program.run(FORWARD)["out"]
    ONNX.prepare(program, FORWARD, StubDevice())
    with torch.no_grad():
        for parameter in program.module.parameters():
            parameter.mul_(2.0)
    assert ONNX.bakes
    torch.testing.assert_close(program.run(FORWARD)["out"], expected)
    ONNX.finish()


@pytest.mark.slow
@needs_packages
def test_stale_weights_fail(tmp_path: Path) -> None:
    class Wrong(OnnxRuntime):
        def converted(self, program: Program, device: Device) -> OnnxRuntimeModule:
            with torch.no_grad():
                program.module.get_parameter("fc1.bias").neg_()
            try:
                return super().converted(program, device)
            finally:
                with torch.no_grad():
                    program.module.get_parameter("fc1.bias").neg_()

    record = failed(Store(tmp_path), Wrong(), seeded("mlp"))
    assert faults(record).keys() == {"out"}


@pytest.mark.slow
@needs_packages
def test_a_query_that_sees_no_key_is_exported_as_one_that_sees_all(tmp_path: Path) -> None:
    """Onnxscript masks with the lowest float, so that the row's softmax is uniform, not zero."""
    record = failed(Store(tmp_path), ONNX, seeded("attention-empty-row"))
    assert "row at [1, 1, 5, :]" in record.why


def profiled(path: Path, *providers: str) -> Path:
    """A profile as sessions write it: one event of another kind, and two for each node."""
    events: list[dict[str, Any]] = [{"cat": "Session", "name": "model_run", "args": {}}]
    for provider in providers:
        events.append({"cat": "Node", "name": "Gemm_fence_before", "args": {"op_name": "Gemm"}})
        events.append({"cat": "Node", "name": "Gemm_kernel_time", "args": {"op_name": "Gemm", "provider": provider}})
    path.write_text(json.dumps(events))
    return path


def test_nodes_are_read_with_their_providers(tmp_path: Path) -> None:
    nodes = nodes_of(profiled(tmp_path / "a.json", "CUDAExecutionProvider", "CPUExecutionProvider"))
    assert nodes == [OnnxNode("Gemm", "CUDAExecutionProvider"), OnnxNode("Gemm", "CPUExecutionProvider")]


@pytest.mark.parametrize(
    ("first", "ran", "missing"),
    [
        ("CUDAExecutionProvider", ("CUDAExecutionProvider",), []),
        (
            "CPUExecutionProvider",
            ("CPUExecutionProvider",),
            [
                "first execution provider is CUDAExecutionProvider",
                "nodes that CUDAExecutionProvider ran >= 1",
                "nodes that other providers ran, except for shapes on the CPU = 0",
            ],
        ),
        (
            "CUDAExecutionProvider",
            ("CUDAExecutionProvider", "CPUExecutionProvider"),
            ["nodes that other providers ran, except for shapes on the CPU = 0"],
        ),
    ],
)
def test_fallbacks_to_the_cpu_fail_evidence(tmp_path: Path, first: str, ran: Sequence[str], missing: list[str]) -> None:
    session = object.__new__(OnnxRuntimeModule)
    profile = profiled(tmp_path / "profile.json", *ran)
    session.session = SimpleNamespace(get_providers=lambda: [first], end_profiling=lambda: str(profile))
    session.provider, session.calls, session.entries = "CUDAExecutionProvider", 1, []
    assert [item.claim for item in session.evidence() if not item.engaged] == missing


GRAPH = (  # what onnxruntime 1.32 wrote of Relu(x).reshape(2 * rows, -1) for 4 rows of 6: operator, inputs, outputs
    ("Relu", [{"float": [4, 6]}], [{"float": [4, 6]}]),
    ("Shape", [{"float": [4, 6]}], [{"int64": [2]}]),
    ("Gather", [{"int64": [2]}, {"int64": [1]}], [{"int64": [1]}]),
    ("Mul", [{"int64": [1]}, {"int64": [1]}], [{"int64": [1]}]),
    ("Concat", [{"int64": [1]}, {"int64": [1]}], [{"int64": [2]}]),
    ("Reshape", [{"float": [4, 6]}, {"int64": [2]}], [{"float": [8, 3]}]),
)
SHAPES = frozenset({"Shape", "Gather", "Mul", "Concat"})


@pytest.mark.parametrize(
    ("on_cpu", "others"),
    [
        (SHAPES, 0),
        (SHAPES | {"Relu"}, "Relu on CPUExecutionProvider x1"),
        (SHAPES | {"Reshape"}, "Reshape on CPUExecutionProvider x1"),
    ],
)
def test_nodes_that_compute_shapes_may_stay_on_the_cpu(tmp_path: Path, on_cpu: frozenset[str], others: object) -> None:
    session = object.__new__(OnnxRuntimeModule)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps([node(name, shapes, "CPU" if name in on_cpu else "CUDA") for name, *shapes in GRAPH]))
    session.session = SimpleNamespace(get_providers=lambda: ["CUDAExecutionProvider"], end_profiling=lambda: str(path))
    session.provider, session.calls, session.entries = "CUDAExecutionProvider", 1, []
    entries = {item.claim: item for item in session.evidence()}
    last = entries["nodes that other providers ran, except for shapes on the CPU = 0"]
    assert (last.observed, last.engaged) == (others, others == 0)
    assert entries["nodes that compute shapes on the CPU (any number)"].observed == len(SHAPES)


@pytest.mark.parametrize(
    "data",
    [
        [{"int64": [512]}],  # no shape has so many dimensions
        [{"int64": [2, 2]}],
        [{"float": [2]}],
        [],
    ],
)
def test_integers_that_are_data_may_not_stay_on_the_cpu(data: list[dict[str, list[int]]]) -> None:
    assert not OnnxNode("Gather", "CPUExecutionProvider", data, [{"int64": [2]}]).computes_shapes
    assert not OnnxNode("Gather", "CPUExecutionProvider", [{"int64": [2]}], data).computes_shapes


def node(name: str, shapes: list[Any], provider: str) -> dict[str, Any]:
    """A profile's event of a node that ran."""
    facts = {"op_name": name, "provider": f"{provider}ExecutionProvider"}
    return {"cat": "Node", "args": facts | {"input_type_shape": shapes[0], "output_type_shape": shapes[1]}}


class Binding:
    """Records the calls of an IO binding."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[Any, ...]] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Any, buffer_ptr: int
    ) -> None:
        self.told[name] = (device_type, device_id, element_type, shape, buffer_ptr)

    bind_output = bind_input


class FakeRuntime:
    """A stub of onnxruntime that records a session's arguments. Its only node doubles the input."""

    def __init__(self, *offered: str) -> None:
        self.offered = list(offered)
        self.made: dict[str, Any] = {}

    def get_available_providers(self) -> list[str]:
        return self.offered

    __spec__ = ModuleSpec("onnxruntime", None)  # torch looks for it
    SessionOptions = SimpleNamespace

    def InferenceSession(  # noqa: N802 - the runtime's name
        self, path_or_bytes: str, sess_options: Any, providers: list[Any]
    ) -> Any:
        self.made |= {"path": path_or_bytes, "settings": sess_options, "providers": providers, "binding": Binding()}
        put = SimpleNamespace(name="x", shape=[3, 4], type="tensor(float)")

        def compute(iobinding: Binding) -> None:
            self.made["ran"] = iobinding.told

        return SimpleNamespace(
            io_binding=lambda: self.made["binding"],
            get_inputs=lambda: [put],
            get_outputs=lambda: [SimpleNamespace(name="y", shape=[3, 4], type="tensor(float)")],
            run_with_iobinding=compute,
        )


def test_stubs_have_the_signatures_of_the_package() -> None:
    session = FakeRuntime().InferenceSession("path", None, [])
    stubs = {
        "InferenceSession.__init__": FakeRuntime().InferenceSession,
        "IOBinding.bind_input": Binding().bind_input,
        "IOBinding.bind_output": Binding().bind_output,
        **{f"Session.{name}": stub for name, stub in vars(session).items()},
    }
    path = "onnxruntime/capi/onnxruntime_inference_collection.py"
    assert not [line for name, stub in stubs.items() for line in unlike_upstream("onnxruntime", f"{path}:{name}", stub)]


def test_a_cuda_session_computes_in_fp32_on_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime("CUDAExecutionProvider", "CPUExecutionProvider")
    monkeypatch.setitem(sys.modules, "onnxruntime", cast("ModuleType", fake))
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(save=lambda _: None))
    x = torch.randn(4, 3).t()
    program = Program.of(Problem(nn.Identity(), (x,)))
    synchronized: list[int] = []
    program.synchronize = lambda: synchronized.append(1)
    ONNX.prepare(program, FORWARD, StubDevice("cuda"))
    assert fake.made["providers"] == [("CUDAExecutionProvider", {"use_tf32": 0})]
    assert fake.made["settings"].intra_op_num_threads == 1
    out = program.run(FORWARD)["out"]
    assert out.shape == (3, 4)
    kind, number, element, shape, address = fake.made["ran"]["x"]
    assert (kind, number, str(element), shape) == ("cpu", 0, "float32", (3, 4))
    # A dense copy of the strided input, not the input's own memory.
    assert address != x.data_ptr()
    assert fake.made["ran"]["y"][4] == out.data_ptr()
    assert len(synchronized) == 2  # before the session, and after the run
    ONNX.finish()


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    xla = ONNX.capability(StubDevice("xla"))
    assert (xla.code, xla.verdict) == (Code.NO_BACKEND, Verdict.UNSUPPORTED)
    monkeypatch.setattr(onnx, "installed", lambda _: False)
    assert ONNX.capability(StubDevice("cuda")).ok  # `answer` checks the packages
    monkeypatch.setattr(onnx, "installed", lambda _: True)
    fake = FakeRuntime("CPUExecutionProvider")
    monkeypatch.setitem(sys.modules, "onnxruntime", cast("ModuleType", fake))
    monkeypatch.setitem(sys.modules, "onnxscript", cast("ModuleType", SimpleNamespace()))
    assert ONNX.capability(StubDevice()).ok
    gpu = ONNX.capability(StubDevice("cuda"))
    assert (gpu.code, gpu.verdict) == (Code.WRONG_BUILD, Verdict.UNAVAILABLE)
    rocm = StubDevice("cuda")
    rocm.features |= {"hip"}
    assert "MIGraphXExecutionProvider" in ONNX.capability(rocm).reason
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # importing it raises ImportError
    absent = ONNX.capability(StubDevice())
    assert (absent.code, absent.verdict) == (Code.IMPORT_FAILED, Verdict.UNAVAILABLE)


def test_absent_packages_are_named_with_their_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "installed", lambda _: False)
    monkeypatch.setattr("accelcheck.techniques.base.installed", lambda _: False)
    answer = ONNX.answer(StubDevice())
    assert (answer.code, answer.verdict) == (Code.NO_PACKAGE, Verdict.UNAVAILABLE)
    assert "accelcheck[onnx]" in answer.action


@pytest.mark.parametrize(
    ("device", "name"),
    [(Cpu(), "CPUExecutionProvider"), (Cuda(), "CUDAExecutionProvider"), (Rocm(), "MIGraphXExecutionProvider")],
)
def test_every_device_that_has_a_provider_gets_its_own(device: Device, name: str) -> None:
    assert next(provider for feature, (provider, _) in PROVIDERS.items() if device.has(feature)) == name


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return x * 2


@needs_packages
def test_a_module_that_writes_to_its_inputs_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="writes to its inputs"):
        run(ONNX, Problem(Writing(), (torch.ones(2, 3),), writes=frozenset({0})))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).t()


@pytest.mark.slow
@needs_packages
def test_a_runtime_need_not_give_the_strides_of_eager(tmp_path: Path) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Transposed(), (torch.randn(3, 5, generator=generator),))

    passed(Store(tmp_path), ONNX, Workload("transposed", "A transposed result.", make))
