"""OpenVINO: evidence from its profile, capability, and, where it is installed, results and known defects."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fault_harness import FORWARD, failed, faults, seeded
from process_harness import completed
from technique_harness import Ran, StubDevice, agrees, differences, mlp, named, plain, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.runtimes import openvino
from accelcheck.techniques.runtimes.openvino import TECHNIQUES, OverwriteCheck, ran
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program

MODEL, COMPILED = (named(TECHNIQUES, name) for name in ("openvino", "openvino-compile"))
needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="pip install openvino")


class Two(nn.Module):
    """Takes integers and booleans; returns a dictionary."""

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"picked": x[index], "masked": torch.where(mask, x, 0.0)}


def two() -> Problem:
    torch.manual_seed(0)
    return Problem(Two(), (torch.randn(5, 6).t(), torch.tensor([3, 1]), torch.rand(6, 5) > 0.5))


@needs_openvino
@pytest.mark.parametrize("problem", [mlp, two], ids=["mlp", "two"])
def test_a_converted_model_computes_the_module_in_fp32(problem: Any) -> None:
    agrees(MODEL, problem)


@needs_openvino
def test_a_conversion_does_not_warn_of_trees() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(MODEL, mlp())
    assert [str(fault.message) for fault in caught if "LeafSpec" in str(fault.message)] == []


@needs_openvino
def test_a_default_below_fp32_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    package = openvino.openvino()
    if "BF16" not in package.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16: OpenVINO computes in FP32 whatever is asked for")
    monkeypatch.setattr(openvino, "properties", lambda: {"INFERENCE_PRECISION_HINT": "bf16", "PERF_COUNT": True})
    missing = [line.partition(":")[0] for line in run(MODEL, mlp()).missing()]
    assert missing == ["resolved INFERENCE_PRECISION_HINT is f32", "of them in less than FP32 = 0"]


@pytest.mark.slow
@needs_openvino
def test_a_nan_that_openvino_loses_fails(tmp_path: Path) -> None:
    """Openvino#35649: its ReLU makes 0 of NaN."""
    record = failed(Store(tmp_path), MODEL, seeded("elementwise-bound"))
    assert faults(record) == {"out[0]": {"NaN pattern"}, "out[1]": {"NaN pattern"}}


@needs_openvino
def test_the_telemetry_of_the_converter_is_not_loaded() -> None:
    if sys.modules.get("openvino_telemetry") is not None:
        pytest.skip("something else imported OpenVINO before")
    openvino.openvino()
    with pytest.raises(ImportError):
        importlib.import_module("openvino_telemetry")


@needs_openvino
def test_the_backend_computes_the_module_and_overwrites_earlier_results() -> None:
    program = Program.of(mlp())
    expected = plain(mlp())
    COMPILED.prepare(program, FORWARD, StubDevice())
    judged = program.inputs
    program.inputs = (torch.randn(8, 16),)
    program.run(FORWARD)
    program.inputs = judged
    with COMPILED.watch("cpu") as log:
        result = program.run(FORWARD)
    evidence = tuple(COMPILED.evidence(program, log, FORWARD, StubDevice()))
    COMPILED.finish()
    assert not differences(result, expected)
    assert Ran(result, evidence, program, log).missing() == ["results overwritten by a later call = 0: 1"]


@needs_openvino
@pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules:FutureWarning")  # as it is from torch 2.13 on
def test_registering_the_backend_is_undone() -> None:
    before = torch._dynamo.config.inline_inbuilt_nn_modules
    run(COMPILED, mlp())
    dynamo = "openvino.frontend.pytorch.torchdynamo"
    assert sys.modules[f"{dynamo}.backend"].openvino_options == {}
    assert sys.modules[f"{dynamo}.execute"].req_cache == {}
    assert torch._dynamo.config.inline_inbuilt_nn_modules == before


AFTERWARDS = """
import gc, os, signal
from technique_harness import mlp, named, run
from accelcheck.techniques.runtimes.openvino import TECHNIQUES
for _ in range(3):
    for technique in TECHNIQUES:
        run(technique, mlp())
gc.collect()
signal.signal(signal.SIGCHLD, lambda *_: print("handled"))
os.kill(os.getpid(), signal.SIGCHLD)
"""


@pytest.mark.slow
@needs_openvino
def test_signals_are_handled_after_its_models_are_gone() -> None:
    ended = completed(
        [sys.executable, "-c", AFTERWARDS], env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr


def request(
    hint: str = "f32", place: str = "CPU", *kernels: str, inputs: tuple[str, ...] = ("f32",), node: str = "MatMul"
) -> Any:
    """An inference request with these model properties, whose nodes of one type executed these kernels."""
    ports = [SimpleNamespace(get_element_type=partial(SimpleNamespace, to_string=lambda k=k: k)) for k in inputs]
    properties = {"EXECUTION_DEVICES": [place], "INFERENCE_PRECISION_HINT": SimpleNamespace(to_string=lambda: hint)}
    nodes = [SimpleNamespace(exec_type=kernel, node_type=node, status="Status.EXECUTED") for kernel in kernels]
    nodes.append(SimpleNamespace(exec_type="unknown_bf16", status="Status.NOT_RUN"))
    return SimpleNamespace(
        get_compiled_model=lambda: SimpleNamespace(get_property=properties.__getitem__, inputs=ports),
        get_profiling_info=lambda: nodes,
    )


@pytest.mark.parametrize(
    ("requests", "missing"),
    [
        ([request("f32", "CPU", "gemm_mlas_f32")], []),
        (
            [request("bf16", "CPU", "brgemm_avx512_bf16", "jit_f32")],
            ["resolved INFERENCE_PRECISION_HINT is f32", "of them in less than FP32 = 0"],
        ),
        ([request("f32", "CPU", "ref_i8", inputs=("f32", "i8"))], []),
        ([request("f32", "CPU", "ref_i8", inputs=("f32", "u8"))], ["of them in less than FP32 = 0"]),
        ([request("f32", "CPU", "jit_avx512_i8", inputs=("f32", "boolean"), node="Select")], []),
        ([request("f32", "CPU", "jit_avx512_i8", inputs=("f32", "boolean"))], ["of them in less than FP32 = 0"]),
        ([request("f32", "CPU", "jit_avx512_i8", node="Select")], ["of them in less than FP32 = 0"]),
        ([request("f32", "CPU", "jit_bf16", inputs=("boolean",), node="Select")], ["of them in less than FP32 = 0"]),
        ([request("f32", "GPU", "gemm_f32")], ["execution devices are CPU"]),
        ([request("f32", "CPU")], ["nodes executed >= 1"]),
        ([], ["execution devices are CPU", "resolved INFERENCE_PRECISION_HINT is f32", "nodes executed >= 1"]),
    ],
    ids=[
        "healthy",
        "bfloat16",
        "eight-bits",
        "other-bits",
        "mask",
        "quantized",
        "no-mask",
        "half",
        "elsewhere",
        "nothing",
        "no-request",
    ],
)
def test_each_observation_can_fail(requests: list[Any], missing: list[str]) -> None:
    assert [item.claim for item in ran(requests) if not item.engaged] == missing


def test_results_that_a_later_call_changes_are_counted() -> None:
    shared = torch.zeros(3)
    overwriting = OverwriteCheck(shared.copy_)
    fresh = OverwriteCheck(torch.clone)
    for call in (overwriting, fresh):
        for number in (1.0, 2.0, float("nan"), float("nan")):
            call(torch.full((3,), number))
    assert (overwriting.overwritten, fresh.overwritten) == (2, 0)


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    for technique in TECHNIQUES:
        for kind in ("cuda", "xla"):
            capability = technique.capability(StubDevice(kind))
            assert (capability.code, capability.verdict) == (Code.NO_BACKEND, Verdict.UNSUPPORTED)
        monkeypatch.setattr(openvino, "installed", lambda _: False)
        assert technique.capability(StubDevice()).ok  # `answer` checks the packages
        monkeypatch.setattr("accelcheck.techniques.base.installed", lambda _: False)
        answer = technique.answer(StubDevice())
        assert (answer.code, answer.action) == (Code.NO_PACKAGE, "pip install 'accelcheck[openvino]'")
        monkeypatch.setattr(openvino, "installed", lambda _: True)
        monkeypatch.setitem(sys.modules, "openvino", None)  # importing it raises ImportError
        broken = technique.capability(StubDevice())
        assert (broken.code, broken.verdict) == (Code.IMPORT_FAILED, Verdict.UNAVAILABLE)
        monkeypatch.setitem(sys.modules, "openvino", cast("ModuleType", SimpleNamespace()))
        assert technique.capability(StubDevice()).ok


class Last(nn.Module):
    """Uses the last two of its inputs alone."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[-2] - 2 * inputs[-1]


@needs_openvino
def test_inputs_that_the_graph_does_not_use_may_be_left_out() -> None:
    problem = Problem(Last(), tuple(torch.randn(3) for _ in range(4)))
    assert not differences(run(MODEL, problem).result, plain(problem))


class Given(nn.Module):
    """A convolution whose weights are an input."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.conv2d(x, weight)


@needs_openvino
def test_an_operator_that_openvino_does_not_implement_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"OpenVINO cannot convert the module: .*Convolution"):
        run(MODEL, Problem(Given(), (torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3))))
