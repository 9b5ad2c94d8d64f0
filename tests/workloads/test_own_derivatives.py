"""Models of one's own that ask for derivatives in their forward pass, or keep results of earlier passes."""

from __future__ import annotations

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, failed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.core.case import Verdict
from accelcheck.selftest.faults.plant import calling
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import workload_of


class AskedForces(nn.Module):
    """Energy of points and its forces; `own` says how it requires gradients of the points by itself."""

    def __init__(self, *, own: str) -> None:
        super().__init__()
        self.own = own
        self.energy = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        return self.scaled(points, 1.0)

    def scaled(self, points: Tensor, scale: float) -> dict[str, Tensor]:
        if self.own == "of a copy":
            points = points.clone().requires_grad_()
        if self.own == "in place":
            with torch.enable_grad():
                return self.both(points.requires_grad_(), scale)
        return self.both(points, scale)

    def both(self, points: Tensor, scale: float) -> dict[str, Tensor]:
        energy = self.energy(points)
        (slope,) = torch.autograd.grad(energy.sum(), points, create_graph=True)
        return {"energy": energy, "forces": -scale * slope}


def squared(out: dict[str, Tensor], target: Tensor | None) -> Tensor:
    return out["energy"].square().mean() + out["forces"].square().mean()


def workload(model: nn.Module, points: Tensor) -> Workload:
    return workload_of(
        model,
        (points,),
        name="forces",
        loss=squared,
        target=torch.zeros(()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )


@pytest.mark.parametrize("own", ["", "of a copy", "in place"])
def test_a_model_that_asks_for_derivatives_is_judged(fresh: Store, own: str) -> None:
    torch.manual_seed(0)
    points = torch.randn(5, 6).requires_grad_(not own)
    for mode in (FORWARD, BACKWARD, TRAIN):
        passed(fresh, Eager(), workload(AskedForces(own=own), points), mode)
    wrong = calling(lambda module, x: module.model.model.scaled(x, 1.001)["forces"])
    assert (
        verdict_of(fresh, Planted(wrong), workload(AskedForces(own=own), points), FORWARD).verdict is not Verdict.PASS
    )


def test_wrong_forces_fail(fresh: Store) -> None:
    class ForcesAlone(AskedForces):
        def forward(self, points: Tensor) -> Tensor:  # type: ignore[override]
            return self.scaled(points, 1.0)["forces"]

        def wrong(self, points: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.scaled(points, 1.001)["forces"].detach()

    torch.manual_seed(0)
    own = workload_of(ForcesAlone(own="of a copy"), (torch.randn(5, 6),), name="forces")
    passed(fresh, Eager(), own, FORWARD)
    failed(fresh, Planted(calling(lambda module, x: module.model.wrong(x))), own, FORWARD)


def test_another_error_of_a_model_is_its_own() -> None:
    calls: list[bool] = []

    class RaisesOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(torch.is_grad_enabled())
            raise RuntimeError("no such thing")

    with pytest.raises(OwnModelError, match="model: raised RuntimeError with the inputs given: no such thing"):
        workload_of(RaisesOnce(), (torch.ones(2),))
    assert calls == [False]  # gradients would not help


class KeepsScores(nn.Module):
    """Layer that keeps its last scores, as for a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scores: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.scores = [torch.softmax(self.linear(x), -1)]
        return self.scores[0] * 2


def test_a_model_that_keeps_a_result_is_copied(fresh: Store) -> None:
    model = KeepsScores()
    model(torch.randn(3, 6))  # its owner has tried it
    own = workload_of(model, (torch.randn(3, 6),), name="keeps")
    for mode in (FORWARD, BACKWARD):
        passed(fresh, Eager(), own, mode)


@pytest.mark.parametrize("technique", ["eager", "amp-bf16"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_convolution_with_the_older_weight_norm_is_judged(fresh: Store, technique: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv1d(4, 8, 3)), nn.ReLU())
    own = workload_of(model, (torch.randn(2, 4, 9),), name="normed")
    for mode in (FORWARD, BACKWARD):
        record = verdict_of(fresh, Matrix.load().techniques[technique], own, mode)
        assert record.verdict in {Verdict.PASS, Verdict.UNSUPPORTED}, record.reason
