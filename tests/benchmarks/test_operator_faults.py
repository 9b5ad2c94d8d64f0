"""benchmarks/operator_faults.py: each kind of fault changes results, counts calls, and is caught by a bundle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from operator_faults import KINDS, Fault, caught, drawn, index

from accelcheck.techniques.matrix import Matrix

ADD = torch.ops.aten.add.Tensor
ROW = torch.arange(1.0, 10.0)


def fault(kind: str, **more: Any) -> Fault:
    """A fault of `add` in rows of 9, in results of 8 to 16, or in `alpha`."""
    return replace(Fault(ADD, kind, binade=3, rest=1, length=8, option=2), **more)


@pytest.mark.parametrize(
    ("planted", "args", "options", "expected"),
    [
        (fault("value"), (ROW, ROW), {}, [2, 4, 6, *(x * (1 + 2**-10) for x in (8, 10, 12, 14)), 16, 18]),
        (fault("size"), (ROW, ROW), {}, [2, 4, 6, 8, 10, 12, 14, 16, 0]),
        (fault("option"), (ROW, ROW), {"alpha": 2}, (ROW + ROW).tolist()),
        (fault("integer"), (torch.tensor([100, 1]), torch.tensor([100, 1])), {}, [127, 2]),
    ],
)
def test_a_fault_changes_the_results_that_it_is_about(
    planted: Fault, args: tuple[Any, ...], options: dict[str, Any], expected: list[float]
) -> None:
    assert planted.run(args, options).tolist() == expected
    assert planted.hits == 1


def test_a_wrong_stride_reads_other_elements() -> None:
    planted = fault("stride")
    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(planted.run((x, 0.0), {}), torch.arange(6.0).reshape(3, 2))
    assert planted.hits == 1


@pytest.mark.parametrize(
    "planted",
    [fault("value", binade=10), fault("size", rest=2), fault("size", length=16), fault("stride"), fault("option")],
)
def test_a_fault_whose_condition_is_not_met_changes_nothing(planted: Fault) -> None:
    assert torch.equal(planted.run((ROW, ROW), {}), ROW + ROW)
    assert planted.hits == 0


def test_a_seed_draws_the_same_faults() -> None:
    operators = {str(ADD): ADD, "aten.abs.default": torch.ops.aten.abs.default}
    first, again = ([str(drawn(random.Random(seed), operators)) for _ in range(9)] for seed in (1, 1))
    assert first == again
    kinds = {drawn(random.Random(seed), operators).kind for seed in range(60)}
    assert kinds == set(KINDS)


@pytest.mark.slow
def test_a_bundle_catches_a_fault_that_it_reaches() -> None:
    matrix = Matrix.load()
    reduced = {"ops-binary-1": matrix.workloads["ops-binary-1"]}
    operators, labels = index(reduced)
    wrong = replace(fault("value", binade=0), operator=operators["aten.maximum.default"])
    case, level, first = caught(wrong, labels["aten.maximum.default"], matrix)
    assert (case, level) == ("ops-binary-1", 2)
    assert "maximum" in first
