"""Models of one's own whose loss takes several tensors: values and a mask, boxes and classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import FORWARD, TRAIN, Planted, failed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.core.case import Verdict
from accelcheck.techniques.distributed.shards import shards
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import task_of, workload_of
from accelcheck.workloads.signatures import tensors_in


def batch(rows: int = 8) -> tuple[Tensor, dict[str, Any]]:
    """Input, and values with a mask and their unit."""
    return torch.randn(rows, 6), {"value": torch.randn(rows, 3), "parts": [(torch.rand(rows, 3) > 0.5), "metre"]}


def masked(out: Tensor, target: dict[str, Any]) -> Tensor:
    mask, unit = target["parts"]
    assert unit == "metre"
    loss: Tensor = ((out - target["value"]) ** 2 * mask).sum() / mask.sum()
    return loss


def workload(count: int = 2) -> Workload:
    torch.manual_seed(0)
    batches = [batch() for _ in range(count)]
    return workload_of(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        name="masked",
        batches=batches,
        loss=masked,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("technique", ["amp-bf16", "eager", "prefetch-loader"])
def test_a_training_with_several_target_tensors_is_judged(fresh: Store, technique: str) -> None:
    record = verdict_of(fresh, Matrix.load().techniques[technique], workload(), TRAIN)
    assert record.verdict is Verdict.PASS, record.reason


def test_ranks_get_rows_of_every_target_tensor() -> None:
    x, values, mask = torch.arange(5.0), torch.arange(5), torch.arange(5) > 2
    (_, first), (inputs, second) = shards((x,), (values, mask), 2)
    assert [len(part) for part in first] == [3, 3]
    assert [part.tolist() for part in (*inputs, *second)] == [[3.0, 4.0], [3, 4], [True, True]]


def test_a_mask_that_is_lost_fails(fresh: Store) -> None:
    def unmasked(program: Program) -> None:
        for mask in (tensors_in(target)[1] for target in (program.target, *(t for _, t in program.further))):
            mask[0] = True

    own = workload(1)
    passed(fresh, Eager(), own, TRAIN)
    failed(fresh, Planted(unmasked), own, TRAIN)


def test_batches_that_differ_in_more_than_tensors_are_named() -> None:
    batches = [batch(), batch()]
    batches[1][1]["parts"][1] = "mile"
    with pytest.raises(OwnModelError, match="batch 1: target: expected containers, numbers and texts as in batch 0"):
        workload_of(nn.Linear(6, 3), batches=batches, loss=masked, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"unit": "metre"}, "batch 0: target: expected a tensor, or tensors in a container, got dict"),
        ((torch.ones(2), object()), "batch 0: target: expected tensors, numbers and texts in .* got object"),
    ],
)
def test_a_target_that_cannot_be_one_is_named(target: Any, message: str) -> None:
    with pytest.raises(OwnModelError, match=message):
        workload_of(nn.Linear(6, 3), batches=[(torch.ones(2, 6), target)], loss=masked, optimizer=torch.optim.SGD)


def test_a_metric_gets_the_target_as_its_owner_gave_it(fresh: Store) -> None:
    def right(out: Tensor, target: dict[str, Any]) -> Tensor:
        scores: Tensor = ((out > 0) == (target["value"] > 0))[target["parts"][0]]
        return scores

    task = task_of(nn.Linear(6, 3), [batch(4000)], right, max_drop=0.02)
    problem = task.problem(5)
    scores = task.scores(Program.of(problem, seed=5).run(FORWARD), problem.target)
    assert len(scores) == int(tensors_in(problem.target)[1].sum())
