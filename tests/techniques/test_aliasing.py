"""Views that share memory, and indexing operators that copy: storage, writes, and the number of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import built_in
from technique_harness import Calls, StubDevice, agrees, differences, engaged, named, plain, run, workload
from torch import Tensor

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.layout import aliasing, indexing
from accelcheck.techniques.layout.aliasing import MARK, CopyLog
from accelcheck.workloads.base import Problem

(SHARED,) = aliasing.TECHNIQUES
SELECT = named(indexing.TECHNIQUES, "index-select")
ADVANCED = named(indexing.TECHNIQUES, "index-advanced")
INDEXED = [
    ("advanced-indexing", SELECT),
    ("gather", ADVANCED),
    ("gather-repeated", ADVANCED),
    ("index-select", ADVANCED),
]


def of(function: Callable[..., Any], *inputs: Tensor) -> Problem:
    return Problem(Calls(function), inputs or (torch.arange(12.0).view(3, 4),))


def test_views_share_the_inputs_storage_and_see_writes() -> None:
    ran = engaged(SHARED, built_in()["shared-views"].problem(0))
    assert ran.evidence[0].observed == 7
    # Number of elements of each view of (6, 8, 10).
    sizes = [5 * 8 * 5, 480, 4 * 6 * 8, 60, 6 * 8 * 3, 6 * 8, 2 * 80]
    assert ran.evidence[2].observed == str(sizes)
    assert not differences(ran.result, plain(built_in()["shared-views"].problem(0)), 0.0)


def test_collecting_evidence_changes_neither_inputs_nor_outputs() -> None:
    ran = run(SHARED, of(lambda x: x.t()))
    assert torch.equal(ran.program.inputs[0], torch.arange(12.0).view(3, 4))
    assert torch.equal(ran.result["out"], torch.arange(12.0).view(3, 4).t())


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda x: [x.t(), x[1:].clone()], 3),
        (lambda x: x.t().contiguous(), 3),
        (lambda x: x.reshape(-1).index_select(0, torch.arange(12)), 3),
        (lambda x: (x.clone(), x.t())[1], 1),  # a view, after a copy that is not used
    ],
)
def test_copies_fail_the_evidence(function: Callable[[Tensor], Any], missing: int) -> None:
    assert len(run(SHARED, of(function)).missing()) == missing


def test_without_strides_writes_must_still_reach_the_input() -> None:
    stub = StubDevice(features=())
    ran = run(SHARED, of(lambda x: [x.t(), x[1:]]), device=stub)
    assert [entry.engaged for entry in ran.evidence] == [True]
    assert [entry.engaged for entry in run(SHARED, of(lambda x: x.t().clone()), device=stub).evidence] == [False]


def test_writes_change_the_elements_of_their_view_alone() -> None:
    x = torch.arange(12.0).view(3, 4)
    problem = of(lambda x: [x[1], x[:, 1:3]], x.clone())
    ran = run(SHARED, problem)
    assert ran.evidence[2].observed == "[4, 6]"
    assert MARK not in x


def test_copies_are_found_by_storage_address_or_else_by_schema() -> None:
    x = torch.randn(3, 4)

    with CopyLog("cpu") as log:
        x[1:].t().clone().mul_(2).add(1)
        torch.cat([x, x])
        x.to("meta")
    assert log.copied() == {"aten::clone": 1, "aten::add": 1, "aten::cat": 1, "aten::_to_copy": 1}
    assert log.copied("aten::c.*") == {"aten::clone": 1, "aten::cat": 1}
    y = x.to("meta")  # storages of meta tensors have the address 0
    with CopyLog("meta") as log:
        y[1:].t().clone().mul_(2).add(1)
    assert log.copied() == {"aten::clone": 1, "aten::add": 1}


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize(("name", "technique"), INDEXED)
def test_the_replacing_operator_gives_the_same_result(name: str, technique: Any, mode: Mode) -> None:
    ran = agrees(technique, lambda: built_in()[name].problem(0), mode, tolerance=1e-6)
    # Gradients of elements that are selected several times are summed in another order.
    assert torch.equal(ran.result["out"], plain(built_in()[name].problem(0))["out"])


def test_rows_and_columns_by_two_selections_are_two_copies() -> None:
    ran = run(SELECT, built_in()["advanced-indexing"].problem(0))
    assert ran.evidence[0].claim == "aten::index dispatched = 0, of 1 in the plain module"
    assert (ran.evidence[1].claim, ran.evidence[1].observed) == (
        "copies by aten::(index_select|gather) = 2, its calls",
        2,
    )


KEYS = [
    (lambda x, i: x[i], 1),
    (lambda x, i: x[:, i], 1),
    (lambda x, i: x[i, i], 2),
    (lambda x, i: x[i.unsqueeze(-1), i], 2),
    (lambda x, i: x[1:][i], 1),
]


@pytest.mark.parametrize(("function", "copies"), KEYS)
def test_keys_are_translated_to_selections(function: Callable[..., Tensor], copies: int) -> None:
    inputs = torch.randn(5, 6), torch.tensor([3, 0, 2, 2])
    ran = engaged(SELECT, of(function, *inputs))
    assert ran.evidence[1].observed == copies
    assert torch.equal(ran.result["out"], function(*inputs))


@pytest.mark.parametrize("function", [lambda x, i: x[i, 1], lambda x, i: x[i.view(2, 2)], lambda x, i: x[None, i]])
def test_unsupported_keys_are_refused_with_their_shape(function: Callable[..., Tensor]) -> None:
    with pytest.raises(Unsupported, match="no combination of index_select and gather is implemented") as refusal:
        run(SELECT, of(function, torch.randn(5, 6), torch.tensor([3, 0, 2, 2])))
    assert refusal.value.capability.code is Code.NO_FEATURE


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_gather_and_index_select_along_any_dimension(dim: int) -> None:
    x = torch.randn(4, 5, 6)
    index = torch.randint(0, 4, (3, 2, 4))
    for function, by in ((torch.gather, index), (torch.index_select, index[0, 0])):
        ran = engaged(ADVANCED, of(lambda x, i, function=function: function(x, dim, i), x, by))
        assert torch.equal(ran.result["out"], function(x, dim, by))


def selecting(functions: dict[Any, Callable[..., Tensor]]) -> Technique:
    return indexing.Indexing("other", "", "", "index-tensors", indexing.BRACKETS, indexing.SELECTIONS, functions)


def test_an_operator_that_is_not_replaced_fails_the_evidence() -> None:
    ran = run(selecting({}), built_in()["advanced-indexing"].problem(0))
    assert [entry.engaged for entry in ran.evidence] == [False, False, True]


def test_a_selection_that_is_a_view_fails_the_evidence() -> None:
    ran = run(
        selecting({torch.Tensor.__getitem__: lambda x, _: x[1:]}),
        of(lambda x, i: x[i], torch.randn(3, 4), torch.tensor([1, 2])),
    )
    assert [entry.engaged for entry in ran.evidence] == [True, False, False]


def test_traits_select_the_workloads() -> None:
    assert SELECT.accepts(workload("index-tensors"))
    assert ADVANCED.accepts(workload("index-operators"))
    assert SHARED.accepts(workload("views"))
    assert not any(technique.accepts(workload("exact")) for technique in (SELECT, ADVANCED, SHARED))
    result = {
        name: {t for t in ("index-tensors", "index-operators") if t in w.traits} for name, w in built_in().items()
    }
    assert {name for name, traits in result.items() if traits == {"index-tensors"}} == {
        "advanced-indexing",
        "far-elements",
    }
    assert {name for name, traits in result.items() if traits == {"index-operators"}} == {
        "gather",
        "gather-repeated",
        "index-select",
    }
