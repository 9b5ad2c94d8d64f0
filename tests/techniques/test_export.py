"""torch.export: exported programs compute and train as the module, also via a file, and defects fail."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, bench, built_in, case, faults, seeded, verdict_of
from technique_harness import MODES, Ran, StubDevice, agrees, differences, mlp, named, plain, run
from torch import Tensor, nn

from accelcheck.core.case import Mode, Verdict
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.export import TECHNIQUES, DynamicExport, Export, Exported, Saved
from accelcheck.techniques.eager import TECHNIQUES as EAGER
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program

EXPORT, DYNAMIC = (cast("Export", named(TECHNIQUES, name)) for name in ("export", "export-dynamic"))


class Normed(nn.Module):
    """Has buffers that training updates, and is traced differently in training and evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.linear(x))
        return {"hidden": hidden, "dropped": self.drop(hidden) * 0 + hidden.tanh()}


def normed() -> Problem:
    torch.manual_seed(0)
    return Problem(Normed(), (torch.randn(6, 16),))


@pytest.mark.parametrize("mode", MODES)
def test_an_exported_program_is_the_module(mode: Mode) -> None:
    agrees(EXPORT, mlp, mode)


@pytest.mark.parametrize("technique", [EXPORT, DYNAMIC], ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_buffers_structures_and_the_training_flag_are_kept(technique: Technique, mode: Mode) -> None:
    ran = run(technique, normed(), mode)
    assert {line.partition(":")[0] for line in ran.missing()} <= {"sizes served by one program >= 3"}
    assert not differences(ran.result, plain(normed(), mode))


def resized(technique: Technique, mode: Mode, *rows: int) -> Ran:
    """Runs like the engine: warm-up runs with other sizes, then the judged size."""
    program = Program.of(mlp())
    technique.prepare(program, mode, StubDevice())
    for number in rows:
        torch.manual_seed(number)
        program.inputs = (torch.randn(number, 16),)
        result = program.run(mode)
    with technique.watch("cpu") as log:
        evidence = tuple(technique.evidence(program, log, mode, StubDevice()))
    technique.finish()
    return Ran(result, evidence, program, log)


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_one_loaded_program_serves_every_size(mode: Mode) -> None:
    ran = resized(DYNAMIC, mode, 9, 5, 8)
    assert ran.engaged, ran.missing()
    module = mlp().module
    torch.manual_seed(8)
    assert not differences(ran.result, plain(Problem(module, (torch.randn(8, 16),)), mode))
    saved = ran.program.call
    assert isinstance(saved, Saved)
    assert saved.sizes == {(torch.Size((rows, 16)),) for rows in (9, 5, 8)}
    assert saved.dynamic == 1


def test_sizes_that_were_not_served_fail_the_evidence() -> None:
    assert resized(DYNAMIC, FORWARD, 8, 8, 8).missing() == ["sizes served by one program >= 3: 1"]


def test_a_program_for_fixed_sizes_refuses_others() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        resized(EXPORT, FORWARD, 8, 5)


def test_later_changes_of_the_parameters_take_effect() -> None:
    for technique in (EXPORT, DYNAMIC):
        program = run(technique, mlp()).program
        with torch.no_grad():
            for parameter in program.module.parameters():
                parameter.mul_(1.5)
            expected = program.module(*program.inputs)
        torch.testing.assert_close(program.run(FORWARD)["out"], expected, rtol=0.0, atol=0.0)


def test_python_that_still_runs_fails_the_evidence() -> None:
    class Eager(Export):
        def exported(self, program: Program) -> Exported:
            made = super().exported(program)
            assert isinstance(made, Exported)
            made.run = program.module
            return made

    missing = run(Eager(), mlp()).missing()
    assert missing == ["Python forwards entered = 0: Linear, ReLU, Sequential"]


def test_a_replaced_call_fails_the_evidence() -> None:
    class Replaced(Export):
        def exported(self, program: Program) -> Any:
            return program.module

    assert run(Replaced(), mlp()).missing() == ["the call is an exported program: Sequential"]


def test_weights_that_are_lost_in_the_file_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.save writes no bytes of torch_xla's tensors, so that zeros are loaded."""
    load = torch.export.load

    def zeros(file: Any) -> torch.export.ExportedProgram:
        program = load(file)
        for tensor in program.state_dict.values():
            tensor.data.zero_()
        return program

    monkeypatch.setattr(torch.export, "load", zeros)
    names = "0.weight, 0.bias, 2.weight, 2.bias"
    assert resized(DYNAMIC, FORWARD, 9, 5, 8).missing() == [f"weights read back with other bits = 0: {names}"]


def test_workloads_with_control_flow_on_data_are_excluded() -> None:
    branching = built_in()["dynamic-depth"]
    assert not any(technique.accepts(branching) for technique in TECHNIQUES)
    assert all(technique.accepts(built_in()["mlp"]) for technique in TECHNIQUES)
    assert not DYNAMIC.accepts(built_in()["slicing"])


class BiasDropped(Export):
    """A graph pass that removes the bias of every linear layer."""

    def exported(self, program: Program) -> Exported:
        exported = torch.export.export(program.module, program.inputs)
        for node in exported.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.args = node.args[:2]
        return Exported(exported, program.module)


class StaleWeights(DynamicExport):
    """The loaded program keeps the weights with which it was saved."""

    def exported(self, program: Program) -> Saved:
        class Stale(Saved):
            def _loaded(self, inputs: tuple[Any, ...]) -> Exported:
                loaded = super()._loaded(inputs)
                own = {name: tensor.clone() for name, tensor in loaded.graph.state_dict().items()}
                loaded.graph.load_state_dict(own, assign=True)
                return loaded

        return Stale(program.module)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("technique", "found"),
    [(EXPORT, set()), (DYNAMIC, set()), (BiasDropped(), {"out"}), (StaleWeights(), {"not engaged", "out", "prepare"})],
    ids=["healthy", "healthy-dynamic", "bias-dropped", "stale-weights"],
)
def test_planted_faults_fail_and_healthy_programs_pass(fresh: Store, technique: Export, found: set[str]) -> None:
    record = verdict_of(fresh, technique, seeded("mlp"), FORWARD)
    assert record.verdict is (Verdict.FAIL if found else Verdict.PASS), record.why
    assert faults(record).keys() == found


def test_a_custom_gradient_that_export_drops_fails(fresh: Store) -> None:
    """torch.export traces through a custom function, and so differentiates the operators inside it."""
    workload = seeded("straight-through")
    assert verdict_of(fresh, named(EAGER, "eager"), workload, BACKWARD).verdict is Verdict.PASS
    record = bench(fresh, EXPORT, workload).run(case(workload, BACKWARD, technique="export"))
    assert record.verdict is Verdict.FAIL
    assert faults(record).keys() == {"grad:input[0]", "grad:weight"}
