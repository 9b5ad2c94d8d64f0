"""TorchScript: results equal eager's, the original's parameters get the gradients, and the interpreter runs."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import built_in, passed, verdict_of
from technique_harness import MODES, StubDevice, differences
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.techniques.compilation.torchscript import TECHNIQUES, Frozen, Script, TorchScript, Trace, attributes
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Result, Workload

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="TorchScript does not support this Python")


class Small(nn.Module):
    """Linear, batch norm (its buffers change in training), and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.norm(self.first(x)))
        return {"hidden": hidden, "out": self.last(hidden)}


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float, y: Tensor) -> Tensor:
        return x * factor + y


def distance(out: Any, target: Tensor) -> Tensor:
    loss: Tensor = (out["out"] - target).square().mean()
    return loss


def small(seed: int = 0) -> Problem:
    torch.manual_seed(seed)
    return Problem(
        Small(),
        (torch.randn(5, 6),),
        target=torch.randn(5, 3),
        loss=distance,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def judged(technique: TorchScript, mode: Mode, problem: Problem) -> tuple[Result, list[Evidence], Program]:
    """Runs like the engine: prepare, warm up with other inputs, restore, run, collect evidence."""
    program = Program.of(problem)
    before = {name: t.detach().clone() for name, t in program.module.state_dict().items()}
    technique.prepare(program, mode, StubDevice())
    kept = program.inputs
    for _ in range(technique.warmups):
        program.inputs = tuple(torch.randn_like(v) if isinstance(v, Tensor) else v for v in kept)
        program.run(mode)
    program.inputs = kept
    with torch.no_grad():
        for name, tensor in program.module.state_dict().items():
            tensor.copy_(before[name])
    with technique.watch("cpu") as log:
        result = program.run(mode)
    evidence = list(technique.evidence(program, log, mode, StubDevice()))
    technique.finish()
    return result, evidence, program


PAIRS = [(technique, mode) for technique in TECHNIQUES for mode in sorted(technique.modes & set(MODES))]


@pytest.mark.parametrize(("technique", "mode"), PAIRS, ids=lambda x: getattr(x, "name", str(x)))
def test_scripts_give_eagers_result_with_evidence(technique: TorchScript, mode: Mode) -> None:
    expected = Program.of(small()).run(mode)
    result, evidence, _ = judged(technique, mode, small())
    assert all(item.engaged for item in evidence), [item for item in evidence if not item.engaged]
    assert not differences(result, expected, 1e-6)


@pytest.mark.parametrize("technique", [Script(), Trace()], ids=lambda technique: technique.name)
def test_the_programs_parameters_get_the_gradients(technique: TorchScript) -> None:
    result, _, program = judged(technique, Mode.BACKWARD, small())
    names = {f"grad:{name}" for name, _ in program.module.named_parameters()}
    assert names <= result.keys()
    assert all(float(result[name].abs().sum()) > 0 for name in names - {"grad:first.bias"})


def test_tracing_does_not_change_buffers() -> None:
    program = Program.of(small())
    before = copy.deepcopy(program.module.state_dict())
    Trace().prepare(program, Mode.BACKWARD, StubDevice())
    assert all(torch.equal(before[name], tensor) for name, tensor in program.module.state_dict().items())


def test_trace_takes_plain_numbers_as_constants() -> None:
    problem = Problem(Scaled(), (torch.ones(2), 3.0, torch.ones(2)))
    result, evidence, _ = judged(Trace(), Mode.FORWARD, problem)
    assert torch.equal(result["out"], torch.full((2,), 4.0))
    assert all(item.engaged for item in evidence)


def test_python_in_place_of_the_script_fails_the_evidence() -> None:
    technique = Script()
    program = Program.of(small())
    technique.prepare(program, Mode.FORWARD, StubDevice())
    program.call = program.module
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    claims = {item.claim: item for item in technique.evidence(program, log, Mode.FORWARD, StubDevice())}
    assert not claims["the call is a ScriptModule"].engaged
    assert claims["Python forwards entered = 0"].observed == "BatchNorm1d, Linear, Small"
    assert not claims["calls of the interpreter >= 1"].engaged


def test_a_script_in_the_other_mode_fails_the_evidence() -> None:
    technique = Script()
    program = Program.of(small())
    technique.prepare(program, Mode.BACKWARD, StubDevice())
    assert isinstance(program.call, torch.jit.ScriptModule)
    program.call.eval()
    with technique.watch("cpu") as log:
        program.run(Mode.BACKWARD)
    [flag] = [
        e for e in technique.evidence(program, log, Mode.BACKWARD, StubDevice()) if e.claim.startswith("training flag")
    ]
    assert (flag.observed, flag.engaged) == ("False", False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_unfrozen_graph_fails_the_evidence() -> None:
    class Unfrozen(Frozen):
        def scripted(self, program: Program) -> Any:
            return torch.jit.script(program.module)

    _, evidence, program = judged(Unfrozen(), Mode.FORWARD, small())
    [left] = [item for item in evidence if "prim::GetAttr" in item.claim]
    assert not left.engaged
    assert isinstance(program.call, torch.jit.ScriptModule)
    assert {"weight", "bias", "running_mean", "running_var"} <= set(attributes(program.call))


def test_capability_ends_with_python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Script().capability(StubDevice()).ok
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    answer = Script().capability(StubDevice())
    monkeypatch.undo()
    assert (answer.code, answer.verdict) == (Code.WRONG_VERSION, Verdict.UNSUPPORTED)


def test_deprecation_warnings_are_not_shown(recwarn: pytest.WarningsRecorder) -> None:
    Script().prepare(Program.of(small()), Mode.FORWARD, StubDevice())
    assert not [w for w in recwarn if issubclass(w.category, (DeprecationWarning, FutureWarning))]


def of_its_own_class(workload: Workload) -> Workload:
    """The same workload, with a module of a class that has not been scripted yet."""
    kind = type("Own", (type(workload.problem(0).module),), {})

    def make(generator: torch.Generator, extent: int) -> Problem:
        problem = workload.make(generator, extent)
        problem.module.__class__ = kind
        return problem

    return replace(workload, make=make)


def test_results_do_not_depend_on_earlier_cases(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), built_in()["elementwise-5"]
    alone = verdict_of(store, Script(), of_its_own_class(workload), Mode.BACKWARD)
    shared = of_its_own_class(workload)
    verdict_of(store, Script(), shared, Mode.FORWARD)
    after = verdict_of(store, Script(), shared, Mode.BACKWARD)
    assert alone.verdict is after.verdict is Verdict.PASS
    assert after.figures == alone.figures


class Mixed(nn.Module):
    """Returns a mapping of results that differ in structure, of which the tracer takes none."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"pair": (x + 1, x > 0), "one": x * 2, "list": [x - 1]}


def test_trace_takes_results_of_any_structure(tmp_path: Path) -> None:
    workload = Workload("mixed", "A mapping.", lambda g, _: Problem(Mixed(), (torch.randn(4, 3, generator=g),)))
    passed(Store(tmp_path), Trace(), workload)
