"""Rows whose number rounding decides: those that it does not decide are judged, and nothing else passes for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fault_harness import Planted, erred, failed, passed
from torch import Tensor, nn

from accelcheck.core.journal import ErrorCode
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.own_model import workload_of

Detections = dict[str, Tensor]


class Detector(nn.Module):
    """Boxes above a score. That of one box is nearer to the threshold than rounding can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Detections:
        raw = self.head(x)
        boxes, scores = raw[:, :4].cumsum(0), raw[:, 4]
        keep = scores >= scores[::2].sum() - (scores[::2] + 1e3).sum() + 1e3 * len(scores[::2]) + scores[5]
        return {"boxes": boxes[keep], "scores": scores[keep]}


def detector() -> Workload:
    torch.manual_seed(1)
    return workload_of(Detector(), (torch.randn(20, 64),), name="matched-detector", sizes=[])


def changed(change: Callable[[Detections], Detections]) -> Planted:
    return Planted(calling(lambda module, *inputs: change(module(*inputs))))


def test_rows_that_rounding_does_not_decide_are_judged(store: Store) -> None:
    record = passed(store, Planted(nothing), detector())
    assert record.compared > 0
    assert {figure.path for figure in record.figures} >= {"out['boxes']", "out['scores']"}


@pytest.mark.parametrize(
    "change",
    [
        lambda out: {**out, "boxes": out["boxes"] * (1 + 1e-5)},
        lambda out: {**out, "scores": out["scores"].flip(0)},
        lambda out: {name: value.flip(0) for name, value in out.items()},
        lambda out: {name: value[1:] for name, value in out.items()},
        lambda out: {name: value[:0] for name, value in out.items()},
        lambda out: {name: torch.cat([value, value + 1, value + 2, value + 3]) for name, value in out.items()},
    ],
    ids=["scaled", "columns apart", "reversed", "one lost", "none", "others added"],
)
def test_no_other_rows_pass_for_them(change: Callable[[Detections], Detections], store: Store) -> None:
    failed(store, changed(change), detector())


def test_without_enough_such_rows_nothing_is_said(store: Store) -> None:
    class Selected(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sums = x.sum(1)
            return sums[sums >= x.flip(1).cumsum(1)[:, -1]]

    own = workload_of(Selected(), (torch.randn(64, 50),), name="matched-selected", sizes=[])
    record = erred(store, Planted(nothing), own)
    assert record.code == ErrorCode.UNDECIDED
    assert "rounding decides how large a result is" in record.why
