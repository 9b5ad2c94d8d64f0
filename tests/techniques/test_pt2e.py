"""pt2e: the converted graph equals the emulation, faults in it fail, and inductor lowers it to int8 kernels."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import Bed, seeded, verdict_of
from technique_harness import StubDevice, engaged, named, run
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.quantization import pt2e
from accelcheck.techniques.quantization.emulation import eval_copy
from accelcheck.techniques.quantization.pt2e import TECHNIQUES
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.probes import PROBES

STATIC: Any = named(TECHNIQUES, "int8-pt2e-static")
LOWERED: Any = named(TECHNIQUES, "int8-pt2e-inductor")
PLACE = StubDevice(features=("strided", "inductor"))

without_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


class Residual(nn.Module):
    """A residual block of two layers, the second without bias, for an input of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def residual() -> Problem:
    torch.manual_seed(0)
    return Problem(Residual(), (torch.randn(2, 5, 24),))


def stacked() -> Problem:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))
    return Problem(module, (torch.randn(16, 48),))


def error(technique: Any, problem: Problem, out: Tensor, x: Tensor | None = None) -> float:
    """Error of an output for `x` against the emulation, both calibrated on the problem's input."""
    exact, given = eval_copy(problem.module).double(), problem.inputs[0].double()
    with torch.no_grad():
        truth = technique.emulate(exact, (given,))(given if x is None else x.double())
    return float((out.double() - truth).norm() / truth.norm())


@without_torchao
@pytest.mark.parametrize("make", [residual, stacked])
def test_the_converted_graph_equals_the_emulation(make: Callable[[], Problem]) -> None:
    ran = engaged(STATIC, make())
    assert error(STATIC, make(), ran.result["out"]) < 1e-6
    plain = make()
    with torch.no_grad():
        exact = plain.module(*plain.inputs)
    assert float((ran.result["out"] - exact).norm() / exact.norm()) > 1e-3, "int8 must show against FP32"


@without_torchao
def test_values_outside_the_calibrated_range_are_clipped() -> None:
    program = Program.of(stacked())
    STATIC.prepare(program, Mode.FORWARD, PLACE)
    large = 3 * program.inputs[0]
    program.inputs = (large,)
    assert error(STATIC, stacked(), program.run(Mode.FORWARD)["out"], large) < 1e-6


@without_torchao
def test_weights_that_conversion_leaves_behind_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pt2e, "_pruned", lambda graph: graph)
    (missing,) = run(STATIC, stacked()).missing()
    assert missing.startswith("bytes of elements in a file")


@without_torchao
def test_an_unquantized_graph_fails_the_evidence() -> None:
    program = Program.of(stacked())
    program.call = eval_copy(program.module)
    program.extras["converted graph"] = program.call
    with STATIC.watch("cpu") as log:
        program.run(Mode.FORWARD)
    seen = list(STATIC.evidence(program, log, Mode.FORWARD, PLACE))
    assert sum(not call.engaged for call in seen) == len(seen)


@pytest.mark.slow
@without_torchao
@pytest.mark.skipif(not LOWERED.capability(PLACE).ok, reason="nothing is lowered here")
@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="without VNNI sums saturate: docs/findings.md")
def test_the_lowered_graph_multiplies_in_int8_and_equals_the_emulation() -> None:
    ran = engaged(LOWERED, stacked())
    assert error(LOWERED, stacked(), ran.result["out"]) < 1e-6
    assert not bool(torch._inductor.config.freezing), "the setting is held around calls alone"


def operators(word: str, edit: Callable[[list[Any]], None]) -> Change:
    """Arguments of all operators of the converted graph with a name."""

    def change(program: Program) -> None:
        graph: Any = program.call
        for node in graph.graph.nodes:
            if node.op == "call_function" and word in str(node.target):
                arguments = list(node.args)
                edit(arguments)
                node.args = tuple(arguments)
        graph.recompile()

    return change


def zero_off(arguments: list[Any]) -> None:
    """``dequantize(x, scale, zero, ...)`` with a zero point that is one too large."""
    arguments[2] += 1


def seven_bits(arguments: list[Any]) -> None:
    """``quantize(x, scale, zero, low, high, dtype)`` that saturates at 127."""
    arguments[4] = 127


def rolled(program: Program) -> None:
    """Channels of a weight use their neighbours' scales."""
    graph: Any = program.call
    for name, value in graph.state_dict().items():
        if "scale" in name:
            value.copy_(value.roll(1))


FAULTS: dict[str, Change] = {
    "zero point off by one": operators("dequantize_per_tensor", zero_off),
    "saturation at seven bits": operators("quantized_decomposed.quantize_per_tensor", seven_bits),
    "scales of other channels": rolled,
    "healthy": nothing,
}


@pytest.mark.slow(after=1)
@without_torchao
@pytest.mark.parametrize(("name", "change"), FAULTS.items(), ids=FAULTS)
def test_faults_of_the_graph_fail(name: str, change: Change, store: Store) -> None:
    record = verdict_of(store, Planted(STATIC, change), seeded("mlp"))
    assert record.verdict is (Verdict.PASS if name == "healthy" else Verdict.FAIL), record.why + record.traceback
    assert "not engaged" not in record.why


def test_it_needs_torchao_and_lowers_only_on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = STATIC.answer(Bed())
    assert answer.ok or "torchao" in answer.reason
    assert LOWERED.capability(StubDevice("cuda")).code is Code.NO_BACKEND
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert LOWERED.capability(PLACE).code is Code.NO_BACKEND


def test_a_torchao_without_pt2e_is_the_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(pt2e, "torchao_capability", lambda _: SUPPORTED)
    monkeypatch.setattr(importlib, "import_module", missing)
    pt2e.pt2e_capability.cache_clear()
    try:
        assert STATIC.capability(PLACE).code is Code.WRONG_VERSION
    finally:
        pt2e.pt2e_capability.cache_clear()


def test_an_exported_graph_has_one_shape() -> None:
    assert STATIC.admits(PROBES["zeros"])
    assert not STATIC.admits(PROBES["slice"])
    assert not LOWERED.admits(PROBES["zeros"])
