"""Accuracy by a metric of the model's owner."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fault_harness import Planted, erred, failed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.checks.own_accuracy import compared
from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.techniques.compilation.torchscript import Trace
from accelcheck.techniques.eager import Eager
from accelcheck.verify.accuracy import Pairs, upper_bound
from accelcheck.verify.oracle import Store
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import task_of
from accelcheck.workloads.own_task import OwnTask

ACCURACY = Mode.ACCURACY


class Net(nn.Module):
    """Tells which of its features is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.head.weight)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x), "features": x}


def data(samples: int = 100, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(x, x.argmax(1)) for x in torch.randn(count, samples, 4)]


def right(out: Any, target: Tensor) -> Tensor:
    return torch.as_tensor(out["logits"].argmax(1) == target)


def score(out: Any, target: Tensor) -> Tensor:
    return torch.nn.functional.log_softmax(out["logits"], 1)[torch.arange(len(target)), target]


def task(metric: Any = right, samples: int = 100, **more: Any) -> OwnTask:
    return task_of(Net(), data(samples), metric, name="largest", **more)


def swapped(module: Any, x: Tensor) -> Any:
    """Two samples of a hundred are wrong."""
    out = module(x)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return tuple(torch.where(rows < 2, -tensor, tensor) for tensor in out)


@pytest.mark.parametrize("metric", [right, score, lambda out, target: right(out, target).float().mean()])
def test_eager_keeps_its_accuracy_by_every_kind_of_metric(fresh: Store, metric: Any) -> None:
    record = passed(fresh, Eager(), task(metric), ACCURACY)
    assert record.compared == (4 if metric not in (right, score) else 400)


def test_a_technique_that_warms_up_is_judged_too(fresh: Store) -> None:
    passed(fresh, Trace(), task(), ACCURACY)


@pytest.mark.parametrize("metric", [right, lambda out, target: right(out, target).float().mean()])
def test_two_percent_lost_fail_where_one_may_be(fresh: Store, metric: Any) -> None:
    assert verdict_of(fresh, Planted(nothing), task(metric), ACCURACY).verdict is Verdict.PASS
    record = failed(fresh, Planted(calling(swapped)), task(metric), ACCURACY)
    assert "accuracy: view drop: expected at most 1.000e-02, got 2.000%" in record.why
    assert verdict_of(fresh, Planted(calling(swapped)), task(metric, max_drop=0.1), ACCURACY).verdict is Verdict.PASS


def test_too_few_samples_to_decide_are_an_error_that_says_how_many(fresh: Store) -> None:
    record = erred(fresh, Eager(), task(samples=10), ACCURACY)
    assert "40 samples cannot show that the accuracy drops by at most 1.00%" in record.why
    assert "Give 381 samples or more, or a larger max_drop" in record.why


def test_a_drop_within_the_limit_whose_bound_is_not_is_undecided_and_says_what_would_decide(fresh: Store) -> None:
    values = torch.cat([x.amax(1) for x, _ in data(128)])
    limit = float(values.sort(descending=True).values[1:3].mean())  # two of the 512 samples are above

    def two_wrong(module: Any, x: Tensor) -> Any:
        return tuple(torch.where(x.amax(1, keepdim=True) > limit, -tensor, tensor) for tensor in module(x))

    record = erred(fresh, Planted(calling(two_wrong)), task(samples=128), ACCURACY)
    assert "too few samples: 2 lost and 0 won of 512 samples are a drop of 0.39%, at most 1.41% at 97.5%" in record.why
    assert "where 1.00% is allowed; some 1,536 such samples would decide" in record.why


def test_scores_that_spread_need_samples_by_the_square_of_their_interval() -> None:
    before = torch.zeros(100).double()
    drop = compared(before, -torch.linspace(-0.1, 0.1, 100).double() - 0.001, single=False)
    assert drop.bound > 0.01 > drop.drop
    half = drop.drop + (drop.bound - drop.drop) / 2
    assert drop.enough(half) == pytest.approx(400, abs=1)


def test_the_number_of_samples_that_decide_is_the_least() -> None:
    pairs = Pairs(512, 2, 0)
    assert upper_bound(pairs) == pytest.approx(0.0141, abs=1e-4)
    assert pairs.enough(0.01) == 3 * 512
    assert upper_bound(Pairs(1536, 6, 0)) <= 0.01 < upper_bound(Pairs(1024, 4, 0))
    assert Pairs(512, 0, 0).enough(0.01) == 512


def test_scores_of_samples_give_an_interval_and_numbers_of_batches_none() -> None:
    before, after = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([1.0, 2.1, 2.8, 4.0]).double()
    assert compared(before, after, single=True).bound == pytest.approx(0.025, rel=1e-4)
    assert compared(before, after, single=False).bound > 0.1


def test_a_metric_that_raises_or_gives_no_score_is_named(fresh: Store) -> None:
    def raises(out: Any, target: Any) -> Any:
        raise KeyError("logit")

    for metric, words in (
        (raises, "metric: raised KeyError: 'logit'"),
        (lambda out, _: out["logits"], "of shape \\(n,\\)"),
    ):
        record = erred(Store(fresh.cache.folder), Eager(), task(metric), ACCURACY)
        assert re.search(words, record.why), record.why


def test_a_drop_of_nothing_cannot_be_asked_for() -> None:
    with pytest.raises(OwnModelError, match="max_drop: expected a part of the score above 0 and at most 1"):
        task(max_drop=0.0)
