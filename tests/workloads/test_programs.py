"""Random programs: the same for a number everywhere, legal at all extents, sensitive between operators."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, passed, verdict_of
from process_harness import completed
from torch import Tensor

from accelcheck.core.case import Verdict
from accelcheck.verify.oracle import Store
from accelcheck.workloads import float_programs, integer_programs
from accelcheck.workloads.base import Program
from accelcheck.workloads.families import INTEGERS, LAYOUTS, WRITES
from accelcheck.workloads.program_steps import EXTENTS, RandomProgram, Step, grown
from accelcheck.workloads.programs import COUNT, WORKLOADS, named, program

SOME = (2, 6, 10)
X = torch.linspace(-2, 2, 7 * 4 * 5).reshape(7, 4, 5)
PLACES = torch.tensor([2, 0, 1, 2, 1])


def labels(number: int) -> list[str]:
    module: Any = program(number).problem(1).module
    return [step.label for step in module.steps]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1001, 1002])
def test_another_process_draws_the_same_program(number: int) -> None:
    code = f"from accelcheck.workloads.programs import program; print(program({number}).problem(1).module)"
    ended = completed([sys.executable, "-c", code], check=True)
    assert ended.stdout.strip() == str(program(number).problem(1).module)


def test_programs_of_other_numbers_have_other_steps() -> None:
    assert len({tuple(labels(number)) for number in range(1, 9)}) == 8


@pytest.mark.parametrize("number", SOME)
def test_a_program_is_legal_finite_and_differentiable_at_every_extent(number: int) -> None:
    for extent in EXTENTS:
        problem = program(number).problem(3, extent)
        leaves = [value.requires_grad_() for value in problem.inputs if value.is_floating_point()]
        outs = problem.module(*problem.inputs)
        assert all(bool(out.isfinite().all()) for out in outs)
        gradients = torch.autograd.grad([out.sum() for out in outs if out.requires_grad], leaves, allow_unused=True)
        assert any(gradient is not None for gradient in gradients)


def test_inputs_grow_with_the_extent_in_their_first_dimension() -> None:
    sizes = [program(2).problem(3, extent).inputs[0].shape for extent in (0, 2)]
    assert sizes[1] == (sizes[0][0] + 2, *sizes[0][1:])


def test_seeds_change_the_values_and_not_the_steps() -> None:
    first, other = program(2).problem(3), program(2).problem(4)
    assert not torch.equal(first.inputs[0], other.inputs[0])
    assert str(first.module) == str(other.module)


@pytest.mark.parametrize(
    ("table", "arguments"),
    [(float_programs.UNARY, ()), (float_programs.BINARY, (X.flip(0),)), (float_programs.MIXED, (PLACES,))],
)
def test_each_operator_of_a_table_is_legal(table: dict[str, Callable[..., Tensor]], arguments: tuple[Any, ...]) -> None:
    for label, function in table.items():
        assert bool(function(X, *arguments).isfinite().all()), label


@pytest.mark.parametrize("table", [float_programs.REDUCTIONS, float_programs.SHAPES, float_programs.INDEXED])
def test_every_operator_over_a_dimension_is_legal(table: dict[str, Callable[..., Tensor]]) -> None:
    integers = (PLACES,) if table is float_programs.INDEXED else ()
    for label, function in table.items():
        assert bool(function(X, *integers, dim=1).isfinite().all()), label


@pytest.mark.parametrize("view", sorted(LAYOUTS.keys() - {"expanded", "windows"}))  # whose elements share memory
@pytest.mark.parametrize("write", float_programs.STEADY_WRITES)
def test_a_write_through_a_view_shows_and_leaves_the_argument_alone(view: str, write: str) -> None:
    x = torch.linspace(-2, 2, 12 * 18).reshape(12, 18)
    before = x.clone()
    options: dict[str, Any] = {"view": LAYOUTS[view], "late": torch.sin}
    out = float_programs.written(x, writes=[WRITES[write]], **options)
    assert torch.equal(x, before)
    assert not torch.equal(out, float_programs.written(x, writes=[], **options))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("table", [integer_programs.UNARY, integer_programs.BINARY, integer_programs.MADE])
def test_every_operator_of_integers_gives_integers(table: dict[str, Callable[..., Tensor]], dtype: torch.dtype) -> None:
    x = torch.randint(-100, 101, (7, 4, 5)).to(dtype)
    for label, function in table.items():
        out = function(x, x.flip(0)) if table is integer_programs.BINARY else function(x)
        assert out.dtype in INTEGERS, label
    for label, function in {**integer_programs.REDUCTIONS, **integer_programs.MOVES}.items():
        assert function(x, dim=1).dtype in INTEGERS, label


@pytest.mark.parametrize("number", [3, 7, 11])
def test_a_program_of_integers_is_legal_at_every_extent_and_names_the_inputs_that_it_writes_to(number: int) -> None:
    assert program(number).modes == {FORWARD}
    for extent in EXTENTS:
        problem = program(number).problem(3, extent)
        before = [value.clone() for value in problem.inputs]
        assert all(out.dtype in INTEGERS for out in problem.module(*problem.inputs))
        changed = {place for place, value in enumerate(problem.inputs) if not torch.equal(value, before[place])}
        assert changed <= problem.writes
        assert bool(changed) == bool(problem.writes)


def test_an_operator_that_is_illegal_at_another_extent_is_refused() -> None:
    def only_seven(x: Tensor) -> Tensor:
        if len(x) != 7:
            raise RuntimeError("not for other sizes")
        return x * 2

    proposals = itertools.cycle([Step("only seven", only_seven, (0,)), Step("doubled", lambda x: x * 2, (0,))])
    grew = grown(
        random.Random(1),
        lambda extent: (torch.ones(7 + extent, 2),),
        lambda _: next(proposals),
        torch.is_floating_point,
        lambda *_: True,
    )
    assert {step.label for step in grew.steps} == {"doubled"}


@pytest.mark.parametrize("number", [1, 2, 126])  # without it, 126 gives back half of an input alone
def test_a_program_computes_a_result(number: int) -> None:
    problem = program(number).problem(3)
    memory = {value.untyped_storage().data_ptr() for value in problem.inputs}
    assert any(out.untyped_storage().data_ptr() not in memory for out in problem.module(*problem.inputs))


def test_a_branch_is_taken_by_size() -> None:
    functions = (torch.sin, torch.cos)
    assert torch.equal(float_programs.branch(X, dim=0, size=6, functions=functions), X.cos())
    assert torch.equal(float_programs.branch(X, dim=0, size=7, functions=functions), X.sin())


def test_programs_are_known_by_name_and_by_the_id_of_a_case() -> None:
    words = ["program-1001", "mlp", "program-*", "eager/program-77/cpu/float32/forward", "program-3", "program-01"]
    assert [workload.name for workload in named(words)] == ["program-77", "program-1001"]
    assert len(WORKLOADS) == COUNT


def test_a_program_that_is_asked_for_runs_at_every_level() -> None:
    assert set(program(COUNT + 1).levels.values()) == {1}
    assert min(program(COUNT).levels.values()) == 3


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize("number", SOME)
def test_eager_passes(number: int, mode: Any, store: Store) -> None:
    passed(store, Planted(lambda _: None), program(number), mode)


def test_a_write_to_an_input_that_is_lost_fails(store: Store) -> None:
    number = next(number for number in range(1, COUNT, 2) if program(number).problem(1).writes)

    def lose(program: Program) -> None:
        module: Any = program.module
        steps = tuple(replace(s, function=lambda x: x + 1, writes=False) if s.writes else s for s in module.steps)
        program.call = RandomProgram(steps, module.results)

    record = failed(store, Planted(lose), program(number))
    assert any("input" in fault.path for fault in record.faults)
    assert verdict_of(store, Planted(lambda _: None), program(number)).verdict is Verdict.PASS


def test_a_write_that_is_lost_fails(store: Store) -> None:
    number = next(number for number in range(2, COUNT, 2) if any(" to " in label for label in labels(number)))

    def lose(program: Program) -> None:
        module: Any = program.module
        steps = tuple(
            replace(step, function=partial(step.function, writes=[])) if " to " in step.label else step
            for step in module.steps
        )
        program.call = RandomProgram(steps, module.results)

    assert verdict_of(store, Planted(lose), program(number)).verdict is Verdict.FAIL
