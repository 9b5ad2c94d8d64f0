"""Other sizes of somebody's own model: found by trying, or given, and judged like the example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, failed, observed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.checks.remarks import ONE_SIZE, SIZES
from accelcheck.core.case import stable_seed
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.techniques.compilation.compile import DynamicCompile
from accelcheck.techniques.compilation.export import Export
from accelcheck.techniques.eager import Eager
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import workload_of


def layers(**more: Any) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return workload_of(model, (torch.randn(8, 6),), name="layers", **more)


def wrong_in_the_last_rows(module: Any, x: Tensor) -> Any:
    """Leaves out the rows after the last multiple of 8, as a kernel without a loop for the rest does."""
    rows = (torch.arange(len(x)) < len(x) // 8 * 8).to(x.dtype)
    return module(x) * rows[:, None]


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_what_is_wrong_for_batches_that_8_does_not_divide_fails(mode: Any, fresh: Store) -> None:
    passed(fresh, Planted(nothing), layers(), mode)
    record = failed(fresh, Planted(calling(wrong_in_the_last_rows)), layers(), mode)
    assert "dimension 0 = 9" in {fault.draw for fault in record.faults}
    assert "" not in {fault.draw for fault in record.faults}  # it is right at the example's batch of 8


def squeezed(module: Any, x: Tensor) -> Any:
    return module(x).squeeze()


def refusing(module: Any, x: Tensor) -> Any:
    if len(x) % 8 == 1:
        raise RuntimeError("the batch must be a multiple of 8")
    return module(x)


@pytest.mark.parametrize(
    ("wrong", "draws"), [(squeezed, {"dimension 0 = 1"}), (refusing, {"dimension 0 = 9", "dimension 0 = 1"})]
)
def test_what_is_wrong_or_raises_at_another_size_alone_fails(wrong: Any, draws: set[str], fresh: Store) -> None:
    record = failed(fresh, Planted(calling(wrong)), layers(), FORWARD)
    assert {fault.draw for fault in record.faults} == draws
    assert wrong is squeezed or {fault.view for fault in record.faults} == {"RuntimeError"}


def test_the_record_says_which_sizes_were_judged_and_which_cannot_vary(fresh: Store) -> None:
    record = passed(fresh, Eager(), layers(), FORWARD)
    assert observed(record, SIZES) == "dimension 0 = 9; dimension 0 = 1"
    assert observed(record, ONE_SIZE).startswith("dimension 1 of 6 cannot vary: RuntimeError: mat1 and mat2 shapes")


def attended(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x @ y.mT, -1) @ y


def grouped(x: Tensor) -> Tensor:
    return x.view(-1, 8, 4).softmax(1)


TABLE = torch.randn(65, 1)


def limited(x: Tensor) -> Tensor:
    return x.flatten(0, 1) + TABLE[: x.size(0) * x.size(1)]


def test_dimensions_grow_together_or_not_at_all() -> None:
    assert "resizable" not in workload_of(limited, (torch.randn(8, 6, 5),)).traits
    assert "resizable" in workload_of(limited, (torch.randn(2, 3, 5),)).traits


def placed(x: Tensor) -> Tensor:
    return x.cos() + torch.linspace(-1, 1, 8)[torch.arange(len(x))][:, None, None]


@pytest.mark.parametrize(
    ("model", "shapes", "sizes"),
    [
        (attended, [(2, 4, 8), (2, 4, 8)], "dimension 0 = 3, dimension 1 = 5; dimension 0 = 1"),
        (placed, [(8, 3, 6)], "dimension 0 = 7, dimension 1 = 4"),
        (grouped, [(8, 8, 4)], "dimension 0 = 9"),
    ],
    ids=["all inputs share them", "the first one is at its largest size", "one where the other is whole"],
)
def test_dimensions_vary_together(model: Callable[..., Tensor], shapes: Any, sizes: str, fresh: Store) -> None:
    workload = workload_of(model, tuple(map(torch.randn, shapes)), name="given")
    text = observed(passed(fresh, Eager(), workload, FORWARD), SIZES)
    assert text == sizes if model is attended else text.startswith(sizes)


def test_a_square_matrix_is_not_tried_with_one_row_that_broadcasting_accepts() -> None:
    sizes = workload_of(lambda x: x + x.mT, (torch.randn(4, 4),), name="square").sizes
    assert sizes is not None
    assert [*sizes.workloads] == ["dimension 0 = 5, dimension 1 = 5"]


def test_a_technique_that_fixes_sizes_is_prepared_anew_for_one_other(fresh: Store) -> None:
    record = passed(fresh, Export(), layers(), FORWARD)
    assert observed(record, SIZES).startswith("dimension 0 = 9")


def graph(x: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


def test_inputs_that_share_no_dimension_have_sizes_where_they_are_given(fresh: Store) -> None:
    first = (torch.randn(5, 3), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]))
    record = verdict_of(fresh, Eager(), workload_of(graph, first, name="graph"), FORWARD)
    assert observed(record, SIZES) == ""
    assert observed(record, ONE_SIZE).startswith("dimension 0 differs between inputs: 2, 5")
    other = (torch.randn(3, 3), torch.tensor([[0, 1], [1, 2]]))
    workload = workload_of(graph, first, name="graph", sizes=[other])
    record = passed(fresh, Eager(), workload, FORWARD)
    assert observed(record, SIZES) == "sizes[0]"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(torch.randn(3, 7),)], r"sizes\[0\]: the model raised RuntimeError"),
        ([torch.randn(3, 6)], r"sizes\[0\]: expected a tuple of positional arguments or a mapping .*, got Tensor"),
        ([(torch.arange(3),)], r"sizes\[0\]: expected tensors of torch.float32; got torch.int64"),
        ([()], r"sizes\[0\]: expected tensors of torch.float32; got none"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(OwnModelError, match=message):
        layers(sizes=sizes)


def test_no_other_sizes_are_tried_where_none_are_wanted(fresh: Store) -> None:
    passed(fresh, Planted(calling(wrong_in_the_last_rows)), layers(sizes=[]), FORWARD)


def test_no_two_rows_are_equal_at_another_size() -> None:
    workload = layers()
    assert workload.sizes is not None
    other = workload.sizes.workloads["dimension 0 = 9"].problem(stable_seed("layers")).inputs[0]
    assert other.shape == (9, 6)
    assert len(other.unique(dim=0)) == 9
    assert workload.problem(1).inputs[0].shape == (8, 6)


def test_trying_sizes_changes_nothing_of_the_model() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 0 if len(x) == 8 else 1
            return x * 2

    model: Callable[..., Any] = Counting()
    workload = workload_of(model, (torch.randn(8, 6),))
    assert workload.sizes is not None
    assert workload.sizes.workloads
    assert float(model.seen) == 0  # type: ignore[attr-defined]  # a buffer of the class above


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
def test_a_model_whose_sizes_may_grow_is_compiled_once_for_all_of_them(mode: Any, fresh: Store) -> None:
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    workload = workload_of(
        model,
        batches=batches,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        name="layers",
    )
    assert "resizable" in workload.traits
    technique = DynamicCompile("dynamic", "", level=1, arguments={"backend": "aot_eager", "dynamic": True})
    record = passed(fresh, technique, workload, mode)
    (recompiled,) = (entry for entry in record.evidence if entry.claim.startswith("recompilations over 3 sizes"))
    assert recompiled.engaged


@pytest.mark.slow
def test_a_new_graph_for_another_size_is_no_fault_of_an_owners_model(fresh: Store) -> None:
    def looped(x: Tensor) -> Tensor:
        state = x[0] * 0
        for row in x:
            state = torch.tanh(state + row)
        return state

    technique = DynamicCompile("dynamic", "", level=1, arguments={"backend": "aot_eager", "dynamic": True})
    record = passed(fresh, technique, workload_of(looped, (torch.randn(4, 6),), name="looped"), FORWARD)
    assert any(entry.claim.startswith("recompilations over") and entry.observed for entry in record.evidence)


def test_a_model_that_cannot_grow_by_as_much_as_warm_up_runs_do_is_not_resizable() -> None:
    table = torch.randn(9, 6)
    workload = workload_of(lambda x: x + table[torch.arange(len(x))], (torch.randn(8, 6),))
    assert workload.sizes is not None
    assert "dimension 0 = 9" in workload.sizes.workloads
    assert "resizable" not in workload.traits
