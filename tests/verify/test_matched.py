"""Rows whose number rounding decides: those that it does not decide are judged, and nothing else passes for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fault_harness import Planted, case, erred, failed, passed
from torch import Tensor, nn

from accelcheck.core.journal import ErrorCode
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.verify.matched import aligned, steady
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Result, Workload
from accelcheck.workloads.own_model import workload_of
from accelcheck.workloads.probes import Draw

UNIT = 2.0**-24
MARGIN = 8e-4
"""Most that rounding changes the threshold, or nearly."""
Detections = dict[str, Tensor]


class Detector(nn.Module):
    """Boxes above a score. That of one box is nearer to the threshold than rounding can tell, or hardly farther."""

    def __init__(self, margin: float = 0.0) -> None:
        super().__init__()
        self.head, self.margin = nn.Linear(64, 5), margin

    def forward(self, x: Tensor) -> Detections:
        raw = self.head(x)
        boxes, scores = raw[:, :4].cumsum(0), raw[:, 4]
        keep = (
            scores >= scores[::2].sum() - (scores[::2] + 1e3).sum() + 1e3 * len(scores[::2]) + scores[5] - self.margin
        )
        return {"boxes": boxes[keep], "scores": scores[keep]}


def detector(margin: float = 0.0) -> Workload:
    torch.manual_seed(1)
    return workload_of(Detector(margin), (torch.randn(20, 64),), name=f"matched-detector-{margin}", sizes=[])


ROWS = {"boxes": torch.arange(32.0).reshape(8, 4), "scores": torch.arange(8.0), "labels": torch.arange(8) + 10**6}


def images(*rows: list[int] | range, **changes: Tensor) -> Result:
    """A result of several images, each with some of the rows."""
    columns = {**ROWS, **changes}
    return {f"out[{i}]['{name}']": columns[name][[*own]] for i, own in enumerate(rows) for name in columns}


def changed(change: Callable[[Detections], Detections]) -> Planted:
    return Planted(calling(lambda module, *inputs: change(module(*inputs))))


@pytest.mark.parametrize("more", [0, 1])
def test_rows_that_rounding_does_not_decide_are_judged(more: int, store: Store) -> None:
    own = changed(lambda out: {name: torch.cat([value, value[:more] + 9]) for name, value in out.items()})
    record = passed(store, own, detector())
    assert record.compared > 0
    assert {figure.path for figure in record.figures} >= {"out['boxes']", "out['scores']"}
    assert all(figure.measured == 0 for figure in record.figures if figure.view == "rerun")


def without_the_nearest(module: Detector, x: Tensor) -> Detections:
    out = module(x)
    return {name: value[out["scores"] != module.head(x)[5, 4]] for name, value in out.items()}


def test_a_technique_may_be_the_first_to_lose_a_row(store: Store) -> None:
    own = detector(MARGIN)
    few = [store.get(case(own), Planted(nothing), own, Draw(number)).groups for number in range(3)]
    assert not all(few)  # rounding samples are too few to show it
    passed(store, Planted(calling(without_the_nearest)), own)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda out: {**out, "boxes": out["boxes"] * (1 + 1e-5)}, "view row at"),
        (lambda out: {**out, "scores": out["scores"].flip(0)}, "without 10 of these"),
        (lambda out: {name: value.flip(0) for name, value in out.items()}, "without 0 of these, 10 descents"),
        (lambda out: {name: value[1:] for name, value in out.items()}, "without 1 of these"),
        (lambda out: {name: value[:0] for name, value in out.items()}, "got 0 rows"),
        (lambda out: {name: torch.cat([value, value + 1, value + 2]) for name, value in out.items()}, "without 0"),
        (lambda out: {**out, "scores": out["scores"][1:]}, "out['scores']: shape"),
        (lambda out: {**out, "scores": out["scores"].sum()}, "out['scores']: shape"),
    ],
    ids=["scaled", "columns apart", "reversed", "one lost", "none", "others added", "one column shorter", "one number"],
)
def test_no_other_rows_pass_for_them(change: Callable[[Detections], Detections], why: str, store: Store) -> None:
    assert why in failed(store, changed(change), detector()).why


def test_without_enough_such_rows_nothing_is_said(store: Store) -> None:
    class Selected(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            sums = x.sum(1)
            return sums[sums >= x.flip(1).cumsum(1)[:, -1]]

    own = workload_of(Selected(), (torch.randn(64, 50),), name="matched-selected", sizes=[])
    record = erred(store, Planted(nothing), own)
    assert record.code == ErrorCode.UNDECIDED
    assert "rounding decides how large a result is" in record.why


def test_tables_of_all_images_are_matched_row_by_row() -> None:
    truth = images(range(8), range(8))
    kept = steady(truth, [truth, images(range(8), [1, 0, 2, 3, 4, 5, 6])], UNIT)
    assert kept is not None
    assert kept[1] == {
        "out[0]['boxes']": ([f"out[0]['{name}']" for name in ROWS], 0, 0),
        "out[1]['boxes']": ([f"out[1]['{name}']" for name in ROWS], 1, 1),
    }
    assert {path: len(tensor) for path, tensor in kept[0].items()} == {path: 8 - ("[1]" in path) for path in truth}


@pytest.mark.parametrize(
    "other",
    [
        images([0, 1, 2, 4, 5, 6, 7], boxes=ROWS["boxes"] + 40 * (ROWS["scores"] == 4)[:, None]),
        images([0, 1, 2, 4, 5, 6, 7], scores=ROWS["scores"] + (ROWS["scores"] == 4)),
        images([0, 1, 2, 4, 5, 6, 7], labels=ROWS["labels"] + (ROWS["scores"] == 4)),
    ],
    ids=ROWS,
)
def test_a_row_of_other_numbers_is_no_match(other: Result) -> None:
    truth = images(range(8))
    kept = steady(truth, [other], UNIT)
    assert kept is not None
    assert kept[0]["out[0]['scores']"].tolist() == [0, 1, 2, 5, 6, 7]


def test_one_row_is_not_that_of_two() -> None:
    nearly = {"out": torch.tensor([1.0, 1 + 1e-9, 2, 3], dtype=torch.float64)}
    _, (fault,) = aligned({"out": torch.tensor([1.0, 2, 3, 4])}, nearly, {"out": (["out"], 1, 0)}, UNIT)
    assert fault.got == "4 rows, without 1 of these, 0 descents"
