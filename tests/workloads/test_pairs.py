"""Operators that compilers join or simplify: correct results pass, and each kind of wrong rule fails by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import FORWARD, Planted, failed, passed
from torch import Tensor

from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.selftest.faults.sowing import swapped
from accelcheck.techniques.eager import Eager
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.pairs import WORKLOADS

PAIRS, CONSTANTS, ALGEBRA = WORKLOADS


def without_alpha(plain: Any, x: Any, y: Any, **words: Any) -> Any:
    """Adds products without `alpha`, as a rule does that makes one operator of both."""
    return plain(x, y) if isinstance(y, Tensor) and y.shape == (6, 4) else plain(x, y, **words)


def without_small(plain: Any, x: Tensor, y: Any) -> Any:
    """Leaves out a sum with a number close to 0."""
    return x.clone() if isinstance(y, float) and abs(y) <= 1e-8 else plain(x, y)


def without_sign(plain: Any, x: Tensor, y: Any) -> Any:
    """Takes a sum with 0 for its argument, which may be -0."""
    return x.clone() if y == 0.0 else plain(x, y)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_eager_passes(workload: Workload, fresh: Store) -> None:
    passed(fresh, Eager(), workload, FORWARD)


@pytest.mark.parametrize(
    ("workload", "owner", "name", "wrong", "part"),
    [
        (PAIRS, torch, "add", without_alpha, "mm: added, alpha"),
        (CONSTANTS, Tensor, "__add__", without_small, "plus 1.16415e-10"),
        (ALGEBRA, Tensor, "__add__", without_sign, "plus 0, special"),
    ],
    ids=["alpha", "constants", "signs"],
)
def test_a_wrong_rule_fails_in_the_part_that_it_changes(
    workload: Workload, owner: Any, name: str, wrong: Any, part: str, fresh: Store
) -> None:
    def ruled(module: Any, *inputs: Tensor) -> Any:
        with swapped(owner, name, wrong):
            return module(*inputs)

    passed(fresh, Planted(nothing), workload, FORWARD)
    record = failed(fresh, Planted(calling(ruled)), workload, FORWARD)
    assert f"out['{part}']" in {fault.path for fault in record.faults}
