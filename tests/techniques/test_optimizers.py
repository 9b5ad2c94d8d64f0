from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import TRAIN, faults, passed, seeded, verdict_of
from technique_harness import StubDevice, agrees, mlp, named, run, squared, workload
from torch import nn
from torch.nn import functional

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.registry import discover
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.training import without_option
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.techniques.optimizers.steps import TECHNIQUES, OptimizerStep
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.optimizers import SIZES, Bank
from accelcheck.workloads.own_model import workload_of

FOREACH, FUSED = named(TECHNIQUES, "optimizer-foreach"), named(TECHNIQUES, "optimizer-fused")
CAPTURABLE, COMPILED = named(TECHNIQUES, "optimizer-capturable"), named(TECHNIQUES, "optimizer-compiled")
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)


def training(optimizer: Any) -> Problem:
    problem = mlp()
    return Problem(problem.module, problem.inputs, problem.target, squared, optimizer, steps=3)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("technique", [FOREACH, FUSED], ids=lambda technique: technique.name)
def test_a_step_equals_the_loop(technique: Any, optimizer: Any) -> None:
    agrees(technique, lambda: training(optimizer), Mode.TRAIN)


@pytest.mark.slow
def test_a_compiled_step_equals_the_loop() -> None:
    agrees(COMPILED, lambda: training(SGD), Mode.TRAIN)


@pytest.mark.parametrize("technique", [FOREACH, FUSED, COMPILED], ids=lambda technique: technique.name)
def test_the_plain_loop_fails_the_evidence(technique: Any) -> None:
    class Plain(type(technique)):  # type: ignore[misc]  # a class all the same
        def changed(self, optimizer: torch.optim.Optimizer, device: Any) -> torch.optim.Optimizer:
            return optimizer

    ran = run(Plain("optimizer-plain", ""), training(SGD), Mode.TRAIN)
    assert not ran.evidence[0].engaged
    assert ran.evidence[0].observed == 0


def test_clipping_does_not_count_as_a_step() -> None:
    """Trajectories clip gradients; only operators that change parameters count as steps."""

    class Clipped(type(FOREACH)):  # type: ignore[misc]  # a class all the same
        def changed(self, optimizer: torch.optim.Optimizer, device: Any) -> torch.optim.Optimizer:

            def step() -> None:
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3, foreach=True)

            vars(optimizer)["step"] = step
            return optimizer

    ran = run(Clipped("optimizer-clip", "", foreach=True), training(SGD), Mode.TRAIN)
    assert ran.missing() == ["updates of lists of parameters >= 3: 0"]


def counting(technique: Any, optimizer: torch.optim.Optimizer, device: str) -> list[bool]:
    program = Program.of(training(SGD))
    program.extras["the optimizer that was made last"] = optimizer
    log = ProfilerLog("cpu")
    return [entry.engaged for entry in technique.evidence(program, log, Mode.TRAIN, StubDevice(device))]


def test_step_counts_on_the_host_fail_the_evidence() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter], capturable=True)
    assert counting(CAPTURABLE, optimizer, "meta") == [False, True]  # no step was taken
    optimizer.state[parameter]["step"] = torch.zeros((), device="meta")
    assert counting(CAPTURABLE, optimizer, "meta") == [True, True]
    assert counting(CAPTURABLE, optimizer, "xla") == [False, True]
    optimizer.param_groups[0]["capturable"] = False
    assert counting(CAPTURABLE, optimizer, "meta") == [True, False]


def test_capability_by_device() -> None:
    answers = {
        technique.name: {kind: technique.capability(StubDevice(kind)).code for kind in ("cpu", "cuda", "xla")}
        for technique in (FOREACH, FUSED, CAPTURABLE)
    }
    ok, no = Code.OK, Code.NO_FEATURE
    assert answers == {
        "optimizer-foreach": {"cpu": ok, "cuda": ok, "xla": ok},
        "optimizer-fused": {"cpu": ok, "cuda": ok, "xla": no},
        "optimizer-capturable": {"cpu": no, "cuda": ok, "xla": ok},
    }
    assert COMPILED.capability(StubDevice("xla")).ok
    assert COMPILED.capability(StubDevice("other")).code is Code.NO_BACKEND


@pytest.mark.parametrize(
    ("technique", "optimizer", "name"),
    [(FUSED, torch.optim.NAdam, "NAdam"), (CAPTURABLE, torch.optim.SGD, "SGD")],
    ids=["fused-nadam", "capturable-sgd"],
)
def test_options_that_an_optimizer_lacks_are_refused(technique: Any, optimizer: Callable[..., Any], name: str) -> None:
    program = Program.of(training(partial(optimizer, lr=0.01)))
    with pytest.raises(Unsupported, match=f"{name} has no option"):
        technique.prepare(program, Mode.TRAIN, StubDevice())


def test_a_program_without_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="needs an optimizer"):
        FOREACH.prepare(Program.of(Problem(torch.nn.Linear(2, 2), (torch.ones(1, 2),))), Mode.TRAIN, StubDevice())


def test_every_named_workload_exists_and_is_accepted() -> None:
    known = {thing.name: thing for thing in discover("accelcheck.workloads", "WORKLOADS")}
    for technique in TECHNIQUES:
        assert isinstance(technique, OptimizerStep)
        assert {name for name, thing in known.items() if technique.accepts(thing)} == technique.workloads
        assert technique.early <= known.keys()
    assert FOREACH.accepts(workload("training"))
    assert not FOREACH.accepts(workload("linear"))


def test_parameters_have_awkward_sizes() -> None:
    module = seeded("train-adagrad").problem(0).module
    assert isinstance(module, Bank)
    assert [tuple(weight.shape) for weight in module.weights] == list(SIZES)
    assert {weight.numel() % 16 for weight in module.weights} >= {0, 1, 7}


@pytest.mark.slow
@pytest.mark.parametrize("technique", [FOREACH, FUSED], ids=lambda technique: technique.name)
def test_an_option_that_is_lost_fails(fresh: Store, technique: Any) -> None:
    passed(fresh, technique, seeded("train-nesterov"), TRAIN)
    for lost in ({"momentum": 0.0}, {"nesterov": False}, {"weight_decay": 0.0}):
        record = verdict_of(fresh, Planted(technique, without_option(**lost)(1.0)), seeded("train-nesterov"), TRAIN)
        assert record.verdict is Verdict.FAIL, lost
        assert any(path.startswith("parameter:") for path in faults(record))


@pytest.mark.slow
def test_a_kernel_that_skips_whole_registers_fails(fresh: Store) -> None:
    """torch's fused SGD did this in half precision: it updated only elements beyond the last whole vector register."""

    class Skipping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            before = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
            super().step(closure)
            with torch.no_grad():
                for parameter, old in zip(self.param_groups[0]["params"], before, strict=True):
                    whole = parameter.numel() // 16 * 16
                    mixed = torch.cat([old.reshape(-1)[:whole], parameter.reshape(-1)[whole:]])
                    parameter.copy_(mixed.view(parameter.shape))

    def plant(program: Program) -> None:
        made: Any = program.optimizer
        program.optimizer = lambda parameters: Skipping(parameters, **made([*parameters]).defaults | {"fused": False})

    for dtype in ("float32", "bfloat16"):
        record = verdict_of(fresh, Planted(FOREACH, plant), seeded("train-nesterov"), TRAIN, dtype)
        assert {f"parameter:weights.{index}" for index in (2, 3, 4, 5, 6)} <= faults(record).keys()
        assert "parameter:weights.1" not in faults(record)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("technique", [FOREACH, FUSED], ids=lambda technique: technique.name)
def test_whoever_makes_the_optimizer_need_not_take_an_option(fresh: Store, technique: Any) -> None:
    torch.manual_seed(0)
    module, x, target = (
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        torch.randn(8, 6),
        torch.randn(8, 3),
    )

    def made(parameters: Any) -> torch.optim.Optimizer:
        weights: dict[str, Any] = {
            "params": [parameter for parameter in parameters if parameter.dim() == 2],
            "weight_decay": 0.5,
        }
        biases: dict[str, Any] = {"params": [parameter for parameter in parameters if parameter.dim() == 1]}
        return torch.optim.AdamW([weights, biases], lr=0.01)

    own = workload_of(module, (x,), loss=functional.mse_loss, target=target, optimizer=made)
    passed(fresh, technique, own, TRAIN)
