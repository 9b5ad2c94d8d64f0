"""Torch-TensorRT without a GPU: the compiler's options, exported programs, evidence, and the int8 oracle."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from technique_harness import Ran, StubDevice, agrees, differences, engaged, mlp, named, plain, run
from torch import Tensor, nn
from torch.export import ExportedProgram
from upstream_signatures import signature, unlike_upstream

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.core.registry import discover
from accelcheck.techniques.quantization.int8 import Holder
from accelcheck.techniques.runtimes import tensorrt
from accelcheck.techniques.runtimes.tensorrt import OPTIONS, TECHNIQUES, TensorRt, TensorRtHalf, TensorRtInt8
from accelcheck.workloads.base import Problem

FP32, FP16, INT8 = (cast("TensorRt", named(TECHNIQUES, f"tensorrt-{kind}")) for kind in ("fp32", "fp16", "int8"))
CUDA = StubDevice("cuda")


class TorchTensorRTModule(nn.Module):
    """A stub of an engine that runs the exported graph."""

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        self.graph_module = exported.module()

    def forward(self, *inputs: Tensor) -> Any:
        return self.graph_module(*inputs)


class Compiled(nn.Module):
    """A compiler's result: a module with an engine as a submodule, and perhaps other operators."""

    def __init__(self, exported: ExportedProgram, beside: bool) -> None:
        super().__init__()
        self._run_on_acc_0 = TorchTensorRTModule(exported)
        self.beside = torch.fx.symbolic_trace(Beside()) if beside else nn.Identity()

    def forward(self, *inputs: Tensor) -> Any:
        return self.beside(self._run_on_acc_0(*inputs))


class Beside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.relu.default(x)  # type: ignore[no-any-return]  # operators are untyped


class Compiler:
    """A stub of ``torch_tensorrt.dynamo`` that records its arguments."""

    def __init__(self, make: Callable[[ExportedProgram], nn.Module] | None = None) -> None:
        self.make = make or (lambda exported: Compiled(exported, beside=False))
        self.asked: dict[str, Any] = {}

    def newest(
        self,
        exported_program: ExportedProgram,
        *,
        arg_inputs: Any = None,
        disable_tf32: bool = False,
        min_block_size: int = 5,
        cache_built_engines: bool = False,
        reuse_cached_engines: bool = False,
        **kwargs: Any,
    ) -> nn.Module:
        """The relevant part of torch-tensorrt 2.14's signature."""
        self.asked = {
            "arg_inputs": arg_inputs,
            "disable_tf32": disable_tf32,
            "min_block_size": min_block_size,
            "cache_built_engines": cache_built_engines,
            "reuse_cached_engines": reuse_cached_engines,
            **kwargs,
        }
        return self.make(exported_program)

    def oldest(
        self,
        exported_program: ExportedProgram,
        *,
        arg_inputs: Any = None,
        disable_tf32: bool = False,
        enabled_precisions: Any = frozenset({torch.float32}),
        min_block_size: int = 5,
        use_explicit_typing: bool = False,
        **kwargs: Any,
    ) -> nn.Module:
        """The relevant part of torch-tensorrt 2.9's signature."""
        made = self.newest(
            exported_program, arg_inputs=arg_inputs, disable_tf32=disable_tf32, min_block_size=min_block_size, **kwargs
        )
        self.asked |= {"use_explicit_typing": use_explicit_typing, "enabled_precisions": enabled_precisions}
        return made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    install(monkeypatch, made.newest)
    return made


def install(monkeypatch: pytest.MonkeyPatch, build: Callable[..., nn.Module]) -> None:
    fake = SimpleNamespace(dynamo=SimpleNamespace(compile=build))
    monkeypatch.setitem(sys.modules, "torch_tensorrt", cast("ModuleType", fake))


@pytest.fixture
def modelopt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stub of NVIDIA's modelopt: quantize operators around linear layers, and an operator to export."""
    with torch.library._scoped_library("tensorrt", "FRAGMENT") as library:
        # Another name than that of the real one, which may be installed.
        library.define("quantize_op_stub(Tensor input, Tensor amax) -> Tensor")
        library.impl("quantize_op_stub", _ruled, "CPU")
        library.impl("quantize_op_stub", lambda x, _: torch.empty_like(x), "Meta")
        quantization = SimpleNamespace(INT8_DEFAULT_CFG={"num_bits": 8}, quantize=_quantized)
        utils = SimpleNamespace(export_torch_mode=_export_torch_mode)
        monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", cast("ModuleType", quantization))
        monkeypatch.setitem(sys.modules, "modelopt.torch.quantization.utils", cast("ModuleType", utils))
        yield


def by_127(x: Tensor, amax: Tensor, steps: float = 127.0) -> Tensor:
    """TensorRT's pair of quantize and dequantize layers, in torch's operators."""
    scale = (amax / steps).float().flatten()
    zero = torch.zeros(len(scale), dtype=torch.int32)
    if len(scale) == 1:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, -128, 127)


def by_range(x: Tensor, amax: Tensor) -> Tensor:
    """The symmetric rule of torch.ao and torchao: max|x| / 127.5."""
    return by_127(x, amax, 127.5)


RULES = {"quantize_op_stub": by_127}
"""Implementation of the operator."""


def _ruled(x: Tensor, amax: Tensor) -> Tensor:
    return RULES["quantize_op_stub"](x, amax)


class QuantLinear(nn.Module):
    def __init__(self, linear: nn.Linear, amax: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("input_amax", amax)
        self.register_buffer("weight_amax", linear.weight.detach().abs().amax(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        quantize = torch.ops.tensorrt.quantize_op_stub
        return nn.functional.linear(quantize(x, self.input_amax), quantize(self.weight, self.weight_amax), self.bias)


def _export_torch_mode() -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _quantized(model: nn.Module, config: Any, forward_loop: Callable[[nn.Module], Any]) -> nn.Module:
    assert config == {"num_bits": 8}
    seen: dict[nn.Module, Tensor] = {}
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(lambda m, x: seen.update({m: x[0].abs().amax()})) for layer in layers]
    forward_loop(model)
    for hook in hooks:
        hook.remove()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in seen:
                setattr(parent, name, QuantLinear(cast("nn.Linear", child), seen[child]))
    return model


@pytest.mark.parametrize(
    ("package", "name", "stub"),
    [
        ("torch-tensorrt", "torch_tensorrt/dynamo/_compiler.py:compile", Compiler().newest),
        ("torch-tensorrt==2.9.0", "torch_tensorrt/dynamo/_compiler.py:compile", Compiler().oldest),
        ("nvidia-modelopt", "modelopt/torch/quantization/model_quant.py:quantize", _quantized),
        ("nvidia-modelopt", "modelopt/torch/quantization/utils/core_utils.py:export_torch_mode", _export_torch_mode),
    ],
)
def test_stubs_have_the_signatures_of_the_packages(package: str, name: str, stub: Callable[..., Any]) -> None:
    assert unlike_upstream(package, name, stub) == []


def test_every_option_is_one_of_a_release() -> None:
    releases = ("torch-tensorrt", "torch-tensorrt==2.9.0")
    known = {
        name
        for release in releases
        for name in signature(release, "torch_tensorrt/dynamo/_compiler.py:compile").parameters
    }
    assert not OPTIONS.keys() - known


def test_fp32_graphs_of_any_size_are_compiled_without_tf32(compiler: Compiler) -> None:
    ran = agrees(FP32, mlp, device=CUDA)
    (given,) = compiler.asked.pop("arg_inputs")
    assert given is ran.program.inputs[0]
    assert compiler.asked == {
        "disable_tf32": True,
        "min_block_size": 1,
        "cache_built_engines": False,
        "reuse_cached_engines": False,
    }


def test_older_releases_get_the_option_for_strong_typing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    install(monkeypatch, compiler.oldest)
    assert run(FP32, mlp(), device=CUDA).engaged
    assert compiler.asked["use_explicit_typing"] is True
    assert compiler.asked["enabled_precisions"] == {torch.float32}  # with strong typing, anything else is an error
    assert compiler.asked["disable_tf32"] is True
    assert {"min_block_size", "disable_tf32", "use_explicit_typing"} <= set(OPTIONS)


def test_fp16_casts_inputs_and_outputs(compiler: Compiler) -> None:
    problem = mlp()
    ran = engaged(FP16, problem, device=CUDA)
    assert ran.result["out"].dtype == torch.float32
    exact = plain(mlp())
    assert not differences(ran.result, exact, tolerance=2e-3)
    assert differences(ran.result, exact, tolerance=1e-6)  # it is not FP32
    assert {parameter.dtype for parameter in ran.program.module.parameters()} == {torch.float32}
    assert FP16.precision("float32") == "float16"
    del compiler


def test_integers_and_structures_are_supported(compiler: Compiler) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, index: Tensor) -> dict[str, Tensor]:
            return {"picked": 2 * x[index], "index": index + 1}

    problem = Problem(Two(), (torch.randn(4, 3), torch.tensor([2, 0])))
    ran = run(FP16, problem, device=CUDA)
    assert [ran.result[f"out['{name}']"].dtype for name in ("picked", "index")] == [torch.float32, torch.int64]
    del compiler


def missing(make: Callable[[ExportedProgram], nn.Module], technique: TensorRt, patch: pytest.MonkeyPatch) -> list[str]:
    install(patch, Compiler(make).newest)
    return run(technique, mlp(), device=CUDA).missing()


def test_a_graph_that_stays_in_torch_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    result = missing(lambda exported: exported.module(), FP32, monkeypatch)
    assert result == ["TensorRT engines >= 1: 0", "runs of engines >= 1: 0"]


def test_an_engine_that_does_not_run_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(Compiled):
        def forward(self, *inputs: Tensor) -> Any:
            return self._run_on_acc_0.graph_module(*inputs)

    assert missing(lambda exported: Idle(exported, beside=False), FP32, monkeypatch) == ["runs of engines >= 1: 0"]


def test_operators_left_to_torch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Compiler(lambda exported: Compiled(exported, beside=True)).newest)
    ran = run(FP32, mlp(), device=CUDA)
    seen = {item.claim: item.observed for item in ran.evidence}
    assert ran.engaged
    # The stub of an engine has a graph too.
    assert "aten.relu.default" in str(seen["operators left to torch (any number)"])


def test_a_graph_without_float16_fails_the_evidence(compiler: Compiler) -> None:
    class Uncast(TensorRtHalf):
        def changed(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
            return module

    assert run(Uncast(), mlp(), device=CUDA).missing() == [
        "operators of the exported graph with float16 results >= 1: 0"
    ]
    del compiler


def int8(monkeypatch: pytest.MonkeyPatch, technique: TensorRt, seed: int = 0) -> Ran:
    install(monkeypatch, Compiler(OpaqueEngine).newest)
    return run(technique, mlp(seed), device=CUDA)


class OpaqueEngine(nn.Module):
    """`Compiled` with an engine without a graph, like real ones."""

    def __init__(self, exported: ExportedProgram) -> None:
        super().__init__()
        graph = exported.module()

        class TorchTensorRTModule(nn.Module):
            def forward(self, *inputs: Tensor) -> Any:
                return graph(*inputs)

        self._run_on_acc_0 = TorchTensorRTModule()

    def forward(self, *inputs: Tensor) -> Any:
        return self._run_on_acc_0(*inputs)


def error(ran: Ran, seed: int) -> float:
    """Relative error of a run against the oracle."""
    problem = mlp(seed)
    exact, inputs = problem.module.double().eval(), tuple(value.double() for value in problem.inputs)
    with torch.no_grad():
        truth = INT8.emulate(exact, inputs)(*inputs)
        assert (exact(*inputs) - truth).norm() / truth.norm() > 1e-3  # it is not FP32
    return float((ran.result["out"].double() - truth).norm() / truth.norm())


@pytest.mark.usefixtures("modelopt")
@pytest.mark.parametrize("seed", range(3))
def test_int8_equals_its_oracle(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ran = int8(monkeypatch, INT8, seed)
    assert ran.engaged, ran.missing()
    assert error(ran, seed) <= 1e-6


@pytest.mark.usefixtures("modelopt")
def test_scales_of_another_rule_differ_from_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "quantize_op_stub", by_range)
    assert error(int8(monkeypatch, INT8), 0) > 1e-4


@pytest.mark.usefixtures("modelopt")
def test_layers_that_are_not_quantized_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(TensorRtInt8):
        def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
            return module

    assert int8(monkeypatch, Plain()).missing() == ["int8 quantizers in the exported graph = 4 >= 2: 0"]


@pytest.mark.usefixtures("modelopt")
def test_quantizers_left_to_torch_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Compiler(lambda exported: Compiled(exported, beside=False)).newest)
    # The graph of this stub is visible, like one that TensorRT did not convert.
    assert run(INT8, mlp(), device=CUDA).missing() == ["of them left to torch = 0: 4"]


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="pip install nvidia-modelopt")
def test_the_oracle_equals_modelopts_simulation() -> None:
    problem = mlp()
    module, (x,) = problem.module.eval(), problem.inputs
    with torch.no_grad():
        simulated = INT8.quantized(Holder(module), (x,))(x).double()  # type: ignore[attr-defined]  # of TensorRtInt8
        truth = INT8.emulate(mlp().module.double().eval(), (x.double(),))(x.double())
    assert (simulated - truth).norm() / truth.norm() <= 1e-6


def test_workloads_by_technique() -> None:
    known = {workload.name: workload for workload in discover("accelcheck.workloads", "WORKLOADS")}
    for technique in TECHNIQUES:
        accepted = {name for name, workload in known.items() if technique.accepts(workload)}
        assert accepted == cast("TensorRt", technique).workloads
    # Layer norms would be quantized as well, and so would convolutions.
    assert INT8.workloads == {"mlp", "digits-mlp"}


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    rocm = StubDevice("cuda")
    rocm.features |= {"hip"}
    for technique in TECHNIQUES:
        for device in (StubDevice(), StubDevice("xla"), rocm):
            capability = technique.capability(device)
            assert (capability.code, capability.verdict) == (Code.NO_BACKEND, Verdict.UNSUPPORTED)
        monkeypatch.setattr("accelcheck.techniques.base.installed", lambda _: False)
        monkeypatch.setattr(tensorrt, "installed", lambda _: False)
        absent = technique.answer(CUDA)
        assert (absent.code, absent.verdict) == (Code.NO_PACKAGE, Verdict.UNAVAILABLE)
        assert "accelcheck[tensorrt]" in absent.action
    assert set(INT8.packages) == {"torch_tensorrt", "modelopt"}


def test_an_installation_without_tensorrts_libraries_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise Exception(f"import error when try to import {name}")  # noqa: TRY002 - what torch_tensorrt raises

    monkeypatch.setattr(tensorrt, "installed", lambda _: True)
    monkeypatch.setattr(tensorrt, "importlib", SimpleNamespace(import_module=broken))
    capability = FP32.capability(CUDA)
    assert (capability.code, capability.verdict) == (Code.IMPORT_FAILED, Verdict.UNAVAILABLE)
    assert "import error" in capability.reason
