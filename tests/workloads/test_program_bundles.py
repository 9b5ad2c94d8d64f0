"""Bundles of random programs: the same for a number everywhere, legal, and sensitive to one wrong program."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from fault_harness import FORWARD, Planted, built_in, failed, passed
from process_harness import completed
from torch import Tensor

from accelcheck.verify.oracle import Store
from accelcheck.workloads import program_bundles
from accelcheck.workloads.base import Program, flatten
from accelcheck.workloads.program_bundles import FAMILIES, TABLES, WORKLOADS, drawn, function_of, texts

NAMES = [workload.name for workload in WORKLOADS]


@pytest.mark.parametrize("name", [f"{word}-1" for word in FAMILIES])
def test_every_program_of_a_bundle_runs_and_writes_only_to_its_own_inputs(name: str) -> None:
    problem = built_in()[name].problem(3)
    module: Any = problem.module
    before = [value.clone() for value in problem.inputs]
    out = module(*problem.inputs)
    assert tuple(out) == module.labels
    assert len(dict(flatten(out))) >= len(module.labels)
    changed = {
        place
        for place, (old, new) in enumerate(zip(before, problem.inputs, strict=True))
        if not torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))
    }
    assert changed <= problem.writes
    assert bool(changed) == bool(problem.writes)


@pytest.mark.slow
def test_another_process_draws_the_same_programs() -> None:
    code = "from accelcheck.workloads.program_bundles import texts; print(texts('mixture', 2))"
    assert completed([sys.executable, "-c", code], check=True).stdout.strip() == str(texts("mixture", 2))


def test_bundles_of_a_family_differ_and_seeds_change_values_alone() -> None:
    assert not set(texts("constant", 1)) <= set(texts("constant", 2))
    workload = built_in()["constant-1"]
    first, other = workload.problem(1), workload.problem(2)
    assert first.module.labels == other.module.labels
    assert not torch.equal(first.inputs[0], other.inputs[0])


def test_a_place_keeps_its_entry_and_a_numbered_one_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_bundles, "TABLES", {"digit": list("0123456789"), "nested": ["<digit>"]})
    made = {drawn("<digit> <digit> <digit2> <nested>", random.Random(seed), 0) for seed in range(20)}
    split = [text.split() for text in made]
    assert all(first == second == nested for first, second, _, nested in split)
    assert any(first != third for first, _, third, _ in split)


def test_entries_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_bundles, "TABLES", {"one": ["a<two*>", "b"], "two": ["0", "1"]})
    made = [drawn("<one*>", random.Random(turn), turn) for turn in range(6)]
    assert made == ["a0", "b", "a1", "b", "a0", "b"]


def test_every_table_is_drawn_from() -> None:
    used = "".join(
        [family.template for family in FAMILIES.values()] + [text for table in TABLES.values() for text in table]
    )
    assert {name for name in TABLES if f"<{name}" not in used} == set()


def test_inputs_are_the_names_that_a_program_does_not_assign() -> None:
    function, names = function_of("v = x.t(); f = lambda y: y + v; f(k) * i8.sum()")
    assert names == ("i8", "k", "x")
    assert float(function(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(4.0))) == 14.0


def test_a_bundle_of_python_operators_can_be_scripted_without_some_programs() -> None:
    module: Any = built_in()["language-1"].problem(1).module
    left = module.labels[:3]
    script = torch.jit.script(module.without(frozenset(module.labels) - set(left)))
    x, j = built_in()["language-1"].problem(1).inputs
    assert tuple(script(x, j)) == left


@pytest.mark.parametrize("name", ["overflow-1", "mutation-1", "sign-1"])
def test_eager_passes(name: str, store: Store) -> None:
    passed(store, Planted(lambda _: None), built_in()[name], FORWARD)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["overflow-1", "mixture-1", "constant-1", "arrangement-1"])
def test_one_wrong_number_of_one_program_fails(name: str, store: Store) -> None:
    chosen = texts(*_split(name))[7]

    def wrong(*inputs: Tensor) -> Any:
        out = function_of(chosen)[0](*inputs)
        first = out[0] if isinstance(out, tuple) else out
        spoilt = ~first if first.dtype == torch.bool else first + 1
        return (spoilt, *out[1:]) if isinstance(out, tuple) else spoilt

    def plant(program: Program) -> None:
        module: Any = program.module
        module.parts = tuple((text, wrong if text == chosen else own, places) for text, own, places in module.parts)

    record = failed(store, Planted(plant), built_in()[name])
    assert all(repr(chosen) in fault.path for fault in record.faults)


def test_a_write_that_is_lost_fails(store: Store) -> None:
    def plant(program: Program) -> None:
        plain: Any = program.module
        program.call = lambda *inputs: plain(*(value.clone() for value in inputs))

    record = failed(store, Planted(plant), built_in()["mutation-1"])
    assert {fault.path.partition("[")[0] for fault in record.faults} == {"input"}


def _split(name: str) -> tuple[str, int]:
    word, _, number = name.rpartition("-")
    return word, int(number)
