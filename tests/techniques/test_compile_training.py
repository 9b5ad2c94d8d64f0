"""A whole training step in one compiled function, and autocast inside compiled regions: evidence and faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Bed, bench, built_in, case, faults
from technique_harness import StubDevice, differences, mlp, plain, workload
from torch import Tensor

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.selftest.faults.base import Planted
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import reset_compiler
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.compilation.training_step import AutocastInside, CompiledAutocast, TrainingStep
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Result


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    reset_compiler()


def judged(store: Store, technique: Technique, name: str, mode: Mode) -> Record:
    """The engine's record of a case, on a device without a code generator, so that aot_eager compiles."""
    workload = built_in()[name]
    return bench(store, technique, workload, Bed()).run(case(workload, mode, technique=technique.name))


def evidence(
    technique: Technique, mode: Mode, change: Callable[[Program], None] = lambda _: None
) -> tuple[Result, dict[str, Evidence]]:
    """Result and evidence by claim for an MLP, after a change to the prepared program."""
    program = Program.of(mlp())
    technique.prepare(program, mode, StubDevice())
    try:
        change(program)
        with technique.watch("cpu") as log:
            result = program.run(mode)
        return result, {item.claim: item for item in technique.evidence(program, log, mode, StubDevice())}
    finally:
        technique.finish()


def missing(found: dict[str, Evidence]) -> list[str]:
    return [claim for claim, item in found.items() if not item.engaged]


@pytest.mark.slow
def test_a_compiled_training_step_passes(store: Store) -> None:
    assert TrainingStep().accepts(built_in()["train-mlp"])
    record = judged(store, TrainingStep(), "train-mlp", TRAIN)
    assert record.verdict is Verdict.PASS, record.why
    seen = {item.claim: item.observed for item in record.evidence}
    for what in ("forward passes and losses", "backward passes", "optimizer steps"):
        assert seen[f"compiled {what} run = 4, one a step"] == 4


def test_each_part_of_the_step_that_runs_eagerly_fails_the_evidence() -> None:
    def no_optimizer(program: Program) -> None:
        steps = program.advance

        def advance(optimizer: torch.optim.Optimizer, number: int) -> Tensor:
            kept = optimizer.step
            setattr(optimizer, "step", lambda: None)  # noqa: B010 - mypy lets no method be assigned to
            loss = steps(optimizer, number)  # type: ignore[misc]  # the technique has set it
            setattr(optimizer, "step", kept)  # noqa: B010 - as above
            optimizer.step()
            return loss

        program.advance = advance

    def nothing_compiled(program: Program) -> None:
        program.advance = None

    result, entries = evidence(TrainingStep(), TRAIN, no_optimizer)
    assert not differences(result, plain(mlp(), TRAIN), 1e-6)
    assert missing(entries) == ["compiled optimizer steps run = 3, one a step", "graphs compiled >= 3"]
    _, entries = evidence(TrainingStep(), TRAIN, nothing_compiled)
    assert len(missing(entries)) == 4


def test_a_backward_pass_without_compiled_autograd_fails_the_evidence() -> None:
    def without(program: Program) -> None:
        def training_step(optimizer: torch.optim.Optimizer) -> Tensor:
            loss = program.training_loss(program.inputs, program.target)
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
            return loss

        with torch._dynamo.config.patch(compiled_autograd=False):
            step = torch.compile(training_step, backend="aot_eager")
        program.advance = lambda optimizer, _: step(optimizer).detach()

    _, entries = evidence(TrainingStep(), TRAIN, without)
    assert missing(entries) == ["compiled backward passes run = 3, one a step", "graphs compiled >= 3"]


@pytest.mark.slow
def test_later_trainings_are_compiled_too() -> None:
    """Each training makes an optimizer, whose step is compiled twice: the fifth would reach torch's default limit."""
    technique, program = TrainingStep(), Program.of(mlp())
    technique.prepare(program, TRAIN, StubDevice())
    try:
        for _ in range(5):
            program.run(TRAIN)
        with technique.watch("cpu") as log:
            program.run(TRAIN)
        assert not missing({item.claim: item for item in technique.evidence(program, log, TRAIN, StubDevice())})
        assert entered(log).total() == 9
    finally:
        technique.finish()


@pytest.mark.slow
def test_a_step_that_keeps_old_weights_fails(store: Store) -> None:
    """Fault 27: the compiled forward pass keeps the parameters of the first step."""

    def stale(program: Program) -> None:
        module = program.module
        kept: dict[str, Tensor] = {}

        def call(*inputs: Any) -> Any:
            if not kept:
                kept.update({name: p.detach().clone() for name, p in module.named_parameters()})
            # The value for the old parameters, with the gradient for the new ones.
            old = {name: p + (kept[name] - p).detach() for name, p in module.named_parameters()}
            return torch.func.functional_call(module, old, inputs)

        program.call = call

    caught = faults(judged(store, Planted(TrainingStep(), stale), "train-mlp", TRAIN))
    assert {"loss[1]", "loss[2]", "loss[3]", "parameter:fc1.weight"} <= set(caught)


def test_a_program_uses_advance_for_its_steps() -> None:
    program, taken = Program.of(mlp()), []

    def advance(optimizer: torch.optim.Optimizer, number: int) -> Tensor:
        assert all(parameter.grad is None for parameter in program.module.parameters())
        taken.append((type(optimizer).__name__, number))
        return torch.tensor(float(number))

    program.advance = advance
    result = program.run(TRAIN)
    assert taken == [("SGD", 0), ("SGD", 1), ("SGD", 2)]
    assert float(result["loss[2]"]) == 2.0


@pytest.mark.slow
def test_finish_restores_settings() -> None:
    config = torch._dynamo.config
    before = (config.compiled_autograd, config.recompile_limit, config.fail_on_recompile_limit_hit)
    evidence(TrainingStep(), TRAIN)
    assert (config.compiled_autograd, config.recompile_limit, config.fail_on_recompile_limit_hit) == before


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_autocast_inside_the_compiled_region_passes(store: Store, mode: Mode) -> None:
    assert CompiledAutocast().accepts(built_in()["mlp"])
    record = judged(store, CompiledAutocast(), "mlp", mode)
    assert record.verdict is Verdict.PASS, record.why
    seen = {item.claim: item.observed for item in record.evidence}
    assert seen["autocast regions captured >= 1"] == 1
    assert seen["captured contractions in bfloat16 >= 1"] == 3


def test_autocast_that_is_not_captured_fails_the_evidence() -> None:
    def without(program: Program) -> None:
        program.call = torch.compile(program.module, backend=program.extras["capture"])

    def outside(program: Program) -> None:
        without(program)
        program.around = lambda: torch.autocast("cpu", dtype=torch.bfloat16)

    def twice(program: Program) -> None:
        program.call = torch.compile(
            AutocastInside(Disabled(program.module), "cpu"), backend=program.extras["capture"], dynamic=False
        )

    _, entries = evidence(CompiledAutocast(), FORWARD, without)
    contractions = "captured contractions in bfloat16 >= 1"
    assert missing(entries) == ["autocast regions captured >= 1", contractions, "captured contractions in float32 = 0"]
    _, entries = evidence(CompiledAutocast(), FORWARD, outside)
    assert missing(entries) == ["autocast regions captured >= 1"]
    _, entries = evidence(CompiledAutocast(), FORWARD, twice)
    assert missing(entries) == [contractions, "captured contractions in float32 = 0"]


class Disabled(torch.nn.Module):
    """Disables autocast inside."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


def test_parameters_of_another_dtype_fail_the_evidence() -> None:
    technique, program = CompiledAutocast(), Program.of(mlp())
    technique.prepare(program, FORWARD, StubDevice())
    with technique.watch("cpu") as log:
        program.run(FORWARD)
    program.module.bfloat16()
    entries = {item.claim: item for item in technique.evidence(program, log, FORWARD, StubDevice())}
    technique.finish()
    assert missing(entries) == ["parameters are float32"]


def test_the_compiler_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_for(StubDevice("xla", ())) == "openxla"
    assert backend_for(StubDevice("cuda", ("inductor",))) == "inductor"
    assert backend_for(StubDevice("npu", ())) == "aot_eager"
    monkeypatch.setattr("accelcheck.techniques.compilation.regions.default_backend", lambda: "npu_graphs")
    assert backend_for(StubDevice("npu", ())) == "npu_graphs"
    assert compiler_capability(StubDevice("npu", ())).ok


def test_capability_says_what_inductor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.techniques.compilation.compile.shutil.which", lambda _: None)
    device = StubDevice(features=("inductor", "autocast-bfloat16"))
    for technique in (TrainingStep(), CompiledAutocast()):
        assert technique.capability(device).code is Code.NO_PACKAGE
        assert technique.capability(StubDevice("xla", ("autocast-bfloat16",))).ok
    assert CompiledAutocast().capability(StubDevice("xla", ())).code is Code.NO_FEATURE


def test_workloads_and_modes() -> None:
    assert TrainingStep().accepts(workload("training"))
    assert not TrainingStep().accepts(workload("linear"))
    assert not TrainingStep().accepts(workload("training", "branching"))
    assert CompiledAutocast().accepts(workload("linear"))
    assert not CompiledAutocast().accepts(workload("exact"))
    assert not CompiledAutocast().accepts(built_in()["matmul"])
