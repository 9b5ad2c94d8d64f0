"""Trainings of train mode step by step, programs as problems again, and what a log is not to see."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from technique_harness import squared
from torch import nn

from accelcheck.core.case import Mode
from accelcheck.techniques.observe import OperatorLog, unwatched
from accelcheck.techniques.snapshots.stepwise import StepwiseTraining, adopted
from accelcheck.workloads.base import Problem, Program, Result
from accelcheck.workloads.states import pack, unpack


def program(*, scaled: bool = False) -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    made = Program.of(
        Problem(
            module,
            (torch.randn(10, 6),),
            target=torch.randn(10, 2),
            loss=squared,
            optimizer=partial(torch.optim.AdamW, lr=0.1),
            steps=5,
        )
    )
    made.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    torch.manual_seed(1)
    return made


def unequal(one: Result, other: Result) -> list[str]:
    return [path for path in one.keys() | other.keys() if not torch.equal(one[path], other[path])]


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_make_a_training(scaled: bool) -> None:
    expected = program(scaled=scaled).run(Mode.TRAIN)
    session = StepwiseTraining(program(scaled=scaled))
    while session.step < 5:
        session.take()
    assert list(session.result()) == list(expected)
    assert unequal(session.result(), expected) == []


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_session_goes_on_from_what_another_saved(stop: int) -> None:
    expected = program(scaled=True).run(Mode.TRAIN)
    first = StepwiseTraining(program(scaled=True))
    for _ in range(stop):
        first.take()
    saved = unpack(pack(first.state()))
    second = StepwiseTraining(program(scaled=True))
    with torch.no_grad():
        for parameter in second.program.module.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(99)
    second.load(saved)
    while second.step < 5:
        second.take()
    assert unequal(second.result(), expected) == []
    assert second.program.scaler is not None
    assert second.program.scaler.get_scale() == 32.0


@pytest.mark.parametrize("part", ["module", "optimizer", "scaler", "generator", "losses"])
def test_each_part_of_a_state_matters(part: str) -> None:
    straight = StepwiseTraining(program(scaled=True))
    fresh = copy.deepcopy(straight.state())
    for _ in range(3):
        straight.take()
    saved = {**copy.deepcopy(straight.state()), part: fresh[part]}
    straight.take()
    other = StepwiseTraining(program(scaled=True))
    other.load(saved)
    other.take()
    same = not unequal(straight.result(), other.result()) if part != "losses" else other.step == straight.step
    scalers = straight.program.scaler, other.program.scaler
    assert not same or scalers[0].state_dict() != scalers[1].state_dict()  # type: ignore[union-attr]  # both have one


def test_a_program_is_a_problem_again() -> None:
    made = program()
    problem = made.problem()
    before = copy.deepcopy(problem.module.state_dict())
    expected = made.run(Mode.TRAIN)
    assert all(torch.equal(value, before[name]) for name, value in problem.module.state_dict().items())
    again = Program.of(problem, seed=made.seed)
    torch.manual_seed(1)
    assert unequal(again.run(Mode.TRAIN), expected) == []
    assert (problem.steps, problem.loss, problem.recipe) == (5, squared, None)


def test_what_others_trained_is_taken_over() -> None:
    trained = StepwiseTraining(program())
    while trained.step < 5:
        trained.take()
    made = program()
    result = adopted(made, trained.state()["module"], trained.losses)
    assert unequal(result, trained.result()) == []
    assert torch.equal(made.module.state_dict()["0.weight"], trained.program.module.state_dict()["0.weight"])


def test_a_training_without_a_target_is_refused() -> None:
    made = program()
    made.target = None
    with pytest.raises(ValueError, match="train mode needs a loss, a target and an optimizer"):
        StepwiseTraining(made)


def test_what_is_not_watched_is_not_seen() -> None:
    with OperatorLog("cpu") as log:
        torch.zeros(2) + 1
        with unwatched():
            torch.zeros(2) * 2
        torch.zeros(2) - 1
    assert (log.count("aten::add"), log.count("aten::mul"), log.count("aten::sub")) == (1, 0, 1)
