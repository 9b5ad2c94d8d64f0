"""torch.compile: results equal eager's, and evidence shows compiled code, the number of graphs, and the backend."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marks import needs_compiler
from technique_harness import MODES, StubDevice, differences, squared
from torch import Tensor, nn
from torch._dynamo.utils import get_metrics_context
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.registry import index
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation import compile as compile_module
from accelcheck.techniques.compilation.compile import (
    GRAPH_LAUNCH,
    TECHNIQUES,
    Compiled,
    DynamicCompile,
    MaxAutotune,
    declined_captures,
    graphs,
    reset_compiler,
    resolved_backend,
)
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.workloads.base import Problem, Program, Result

BY_NAME = index("technique", TECHNIQUES)
DECLINED = "graphs that were not captured = 0"


class Branching(nn.Module):
    """Branches on data, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x.relu() if x.sum() > 0 else x.tanh()


def small(rows: int = 5, seed: int = 0) -> Problem:
    torch.manual_seed(seed)
    return Problem(
        nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)),
        (torch.randn(rows, 12),),
        target=torch.randn(rows, 3),
        loss=squared,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def judged(
    technique: Technique, mode: Mode, problem: Problem | None = None, device: Device | None = None
) -> tuple[Result, list[Evidence]]:
    """Runs like the engine: prepare, warm up with other inputs (and sizes), restore, run, collect evidence."""
    device = device or StubDevice(features=("inductor",))
    program = Program.of(problem or small())
    before = {name: t.detach().clone() for name, t in program.module.state_dict().items()}
    technique.prepare(program, mode, device)
    kept = program.inputs, program.target
    for number in range(1, technique.warmups + 1):
        rows = len(kept[0][0]) + (number if technique.resizing else 0)
        program.inputs = (torch.randn(rows, 12),)
        program.target = torch.randn(rows, 3)
        program.run(mode)
    program.inputs, program.target = kept
    with torch.no_grad():
        for name, tensor in program.module.state_dict().items():
            tensor.copy_(before[name])
    with technique.watch(device.type) as log:
        result = program.run(mode)
    return result, list(technique.evidence(program, log, mode, device))


def missing(evidence: list[Evidence]) -> list[str]:
    return [item.claim for item in evidence if not item.engaged]


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    for technique in TECHNIQUES:
        technique.finish()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "compile-aot-eager",
        pytest.param("compile-static", marks=needs_compiler),
        pytest.param("compile-dynamic", marks=needs_compiler),
    ],
)
def test_compiled_results_equal_eagers_with_evidence(name: str, mode: Mode) -> None:
    expected = Program.of(small()).run(mode)
    result, evidence = judged(BY_NAME[name], mode)
    assert not missing(evidence)
    assert not differences(result, expected, 1e-6)


@pytest.mark.slow
@needs_compiler
def test_evidence_needs_inductors_backward_graph() -> None:
    _, evidence = judged(BY_NAME["compile-static"], Mode.BACKWARD)
    seen = {item.claim: item.observed for item in evidence}
    assert seen["inductor graphs called >= 2"] == 2
    assert seen["compiled backward graphs called >= 1"] == 1
    assert seen["backend is inductor"] == "inductor"


@needs_compiler
def test_a_backward_pass_without_kernels_passes() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    _, evidence = judged(BY_NAME["compile-static"], Mode.BACKWARD, Problem(Shift(), (torch.randn(5, 12),)))
    assert not missing(evidence)
    assert {item.claim: item.observed for item in evidence}["inductor graphs called >= 1"] == 1


def test_eager_in_place_of_compiled_fails_the_evidence() -> None:
    technique = BY_NAME["compile-aot-eager"]
    program = Program.of(small())
    technique.prepare(program, Mode.FORWARD, StubDevice(features=()))
    program.call = program.module
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    claims = missing(list(technique.evidence(program, log, Mode.FORWARD, StubDevice(features=()))))
    assert "backend is aot_eager" in claims
    assert "compiled regions entered >= 1" in claims
    assert "graphs compiled >= 1" in claims


def test_a_region_that_runs_eagerly_fails_the_evidence() -> None:
    technique = Compiled("x", "", level=1, arguments={"backend": "eager"})
    _, evidence = judged(technique, Mode.FORWARD)
    assert missing(evidence) == ["AOTAutograd graphs called >= 1"]


def test_graph_breaks_are_counted_and_allowed() -> None:
    torch.manual_seed(0)
    _, evidence = judged(BY_NAME["compile-aot-eager"], Mode.BACKWARD, Problem(Branching(), (torch.randn(5, 12),)))
    assert not missing(evidence)
    seen = {item.claim: item.observed for item in evidence}
    assert int(seen["graph breaks (any number)"]) >= 1
    assert int(seen["compiled regions entered >= 1"]) >= 2


def test_recompilations_fail_the_evidence() -> None:
    specialised = DynamicCompile("x", "", level=1, arguments={"backend": "aot_eager", "dynamic": False})
    _, evidence = judged(specialised, Mode.FORWARD)
    assert missing(evidence) == ["recompilations over 3 sizes = 0", "graphs compiled over 3 sizes = 1"]
    seen = {item.claim: item.observed for item in evidence}
    assert seen["recompilations over 3 sizes = 0"] == 2


def test_the_default_backend_can_be_set() -> None:
    setter: Any = getattr(torch.compiler, "set_default_backend", None)
    if setter is None:
        pytest.skip("this torch has a fixed default backend")
    setter("aot_eager")
    try:
        # The device needs no code generator if the default is another backend.
        assert BY_NAME["compile-static"].capability(StubDevice(features=())).ok
        _, evidence = judged(BY_NAME["compile-static"], Mode.FORWARD, device=StubDevice(features=()))
        assert not missing(evidence)
        assert {item.claim: item.observed for item in evidence}["backend is aot_eager"] == "aot_eager"
    finally:
        setter(None)


def test_the_backend_of_a_module_that_is_not_compiled_is_unknown() -> None:
    assert resolved_backend(nn.Linear(1, 1)) == "unknown"
    assert resolved_backend(torch.compile(nn.Linear(1, 1), mode="max-autotune")) == "inductor"


def test_graph_techniques_need_replays_as_evidence() -> None:
    # A CPU that claims CUDA graphs: the backend skips them, and the evidence fails.
    _, evidence = judged(BY_NAME["compile-cudagraphs"], Mode.FORWARD, device=StubDevice(features=("cuda-graphs",)))
    assert missing(evidence) == ["captured graphs replayed >= 1", DECLINED]
    remark = {item.claim: item.observed for item in evidence}
    assert "due to cpu device" in str(remark[DECLINED])


class Replays(ProfilerLog):
    """Log of a GPU that replayed one captured graph."""

    def count(self, pattern: str) -> int:
        return 1 if pattern == GRAPH_LAUNCH else super().count(pattern)


@needs_compiler
def test_a_graph_that_inductor_declines_to_capture_fails_although_another_one_was_replayed() -> None:
    technique = BY_NAME["compile-reduce-overhead"]
    program = Program.of(small())
    technique.prepare(program, Mode.BACKWARD, StubDevice(features=("inductor", "cuda-graphs")))
    program.run(Mode.BACKWARD)
    with Replays("cpu") as log:
        program.run(Mode.BACKWARD)
    evidence = list(technique.evidence(program, log, Mode.BACKWARD, StubDevice()))
    technique.finish()
    assert missing(evidence) == [DECLINED]
    assert str(evidence[-1].observed).startswith("1: ")  # declined forward, inductor does not try backward


def test_why_a_graph_was_not_captured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_compiler()
    assert declined_captures().engaged
    # What inductor calls in a compilation for a GPU.
    with get_metrics_context():
        log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (1 instances)")
        result = [SimpleNamespace(cudagraph_skip_reason="skipping cudagraphs due to mutated inputs (1 instances)")]
    monkeypatch.setattr(compile_module, "compilations", lambda: result)
    message = declined_captures()
    assert (message.engaged, message.observed) == (False, "1: skipping cudagraphs due to mutated inputs (1 instances)")
    monkeypatch.setattr(compile_module, "compilations", list)
    assert declined_captures().observed == "1: no reason recorded; TORCH_LOGS=cudagraphs shows it"
    reset_compiler()


@needs_compiler
@pytest.mark.slow
def test_max_autotune_times_batched_products_on_the_cpu() -> None:
    class Batched(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.bmm(a, b)

    technique = BY_NAME["compile-max-autotune"]
    program = Program.of(Problem(Batched(), (torch.randn(4, 32, 32), torch.randn(4, 32, 32))))
    expected = torch.bmm(*program.inputs)
    technique.prepare(program, Mode.FORWARD, StubDevice(features=("inductor",)))
    program.run(Mode.FORWARD)
    with technique.watch("cpu") as log:
        result = program.run(Mode.FORWARD)
    evidence = list(technique.evidence(program, log, Mode.FORWARD, StubDevice(features=("inductor",))))
    technique.finish()
    assert not missing(evidence)
    torch.testing.assert_close(result["out"], expected)


def test_max_autotune_with_nothing_to_time_has_no_effect() -> None:
    technique = MaxAutotune("x", "", level=3, arguments={"backend": "aot_eager"})
    with pytest.raises(Unsupported) as raised:
        judged(technique, Mode.FORWARD)
    technique.finish()
    assert raised.value.capability.code is Code.NO_EFFECT


def test_finish_resets_the_compiler() -> None:
    technique = BY_NAME["compile-aot-eager"]
    judged(technique, Mode.FORWARD)
    assert graphs() == 1
    technique.finish()
    assert graphs() == 0


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    xla = BY_NAME["compile-static"].capability(StubDevice("xla", ()))
    assert (xla.code, xla.verdict) == (Code.NO_BACKEND, Verdict.UNSUPPORTED)
    assert "KeyError: 'xla'" in xla.reason
    assert BY_NAME["compile-aot-eager"].capability(StubDevice("xla", ())).ok
    assert BY_NAME["compile-openxla"].capability(StubDevice("xla", ())).ok
    assert BY_NAME["compile-openxla"].capability(StubDevice(features=())).code is Code.NO_BACKEND
    for name in ("compile-reduce-overhead", "compile-cudagraphs"):
        assert BY_NAME[name].capability(StubDevice(features=("inductor",))).code is Code.NO_FEATURE
    monkeypatch.setattr(shutil, "which", lambda _: None)
    absent = BY_NAME["compile-static"].capability(StubDevice(features=("inductor",)))
    assert (absent.code, absent.verdict) == (Code.NO_PACKAGE, Verdict.UNAVAILABLE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert BY_NAME["compile-static"].capability(StubDevice("cuda", ("inductor",))).code is Code.NO_PACKAGE


def test_max_autotune_is_for_contractions() -> None:
    from accelcheck.workloads.base import Workload

    technique = BY_NAME["compile-max-autotune"]
    assert technique.accepts(Workload("a", "", lambda _, __: small(), traits=frozenset({"linear"})))
    assert not technique.accepts(Workload("b", "", lambda _, __: small(), traits=frozenset({"exact"})))
