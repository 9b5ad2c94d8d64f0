"""Trainings of models of other people: batches, and losses of what a model returns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import TRAIN, Planted, failed, passed, verdict_of
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Verdict
from accelcheck.core.journal import ErrorCode
from accelcheck.techniques.compilation.training_step import TrainingStep
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.own_model import workload_of


@dataclass
class Output:
    scores: Tensor
    loss: Tensor | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        scores = self.body(x)
        return Output(scores, None if labels is None else functional.cross_entropy(scores, labels))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(count)]


def training(given: Any, **more: Any) -> Workload:
    torch.manual_seed(0)
    words = {"loss": lambda out, target: functional.cross_entropy(out.scores, target), "optimizer": sgd} | more
    return workload_of(Net(), batches=given, name="net", **words)


def losses(workload: Workload) -> list[float]:
    result = Program.of(workload.problem(0)).run(TRAIN)
    return [float(value) for path, value in result.items() if path.startswith("loss")]


def by_hand(given: list[tuple[Tensor, Tensor]], steps: int) -> list[float]:
    collected = []
    torch.manual_seed(0)
    net = Net()
    optimizer = sgd(net.parameters())
    for step in range(steps):
        x, target = given[step % len(given)]
        loss = functional.cross_entropy(net(x).scores, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        optimizer.step()
        collected.append(float(loss))
    return collected


def test_each_step_takes_the_next_batch_and_the_first_one_again_after_the_last() -> None:
    workload = training(batches(3))
    seed = workload.make.seed  # type: ignore[attr-defined]  # of `Redrawn`
    problem = workload.make(torch.Generator().manual_seed(seed), 0)
    result = Program.of(problem).run(TRAIN)
    outcome = [float(value) for path, value in result.items() if path.startswith("loss")]
    assert outcome == pytest.approx(by_hand(batches(3), 4), rel=1e-6)


def test_a_training_over_batches_leaves_the_first_one_in_place() -> None:
    program = Program.of(training(batches(3)).problem(0))
    before = program.inputs[0].clone()
    program.run(TRAIN)
    assert torch.equal(program.inputs[0], before)


@pytest.mark.slow
def test_a_training_on_batches_is_judged(fresh: Store) -> None:
    workload = training(batches(3))
    passed(fresh, Eager(), workload, TRAIN)
    assert {"training", "batches"} <= workload.traits


def test_one_batch_trained_on_again_and_again_fails(fresh: Store) -> None:
    def stale(program: Program) -> None:
        program.further = ()

    record = failed(fresh, Planted(stale), training(batches(3)), TRAIN)
    assert "loss[1]" in record.why


def test_a_loss_in_the_model_needs_no_target(fresh: Store) -> None:
    given = [{"x": x, "labels": target} for x, target in batches(2)]
    workload = training(given, loss=lambda out, _: out.loss)
    passed(fresh, Eager(), workload, TRAIN)


@pytest.mark.slow
def test_a_compiled_training_step_follows_the_loss_of_a_dataclass(fresh: Store) -> None:
    passed(fresh, TrainingStep(), training(batches(1)), TRAIN)


def test_a_data_loader_is_taken_as_it_is() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)
    workload = training(torch.utils.data.DataLoader(data, batch_size=4))
    assert len(workload.problem(0).further) == 3  # four steps, of five batches


def test_the_callers_batches_are_not_changed() -> None:
    given = batches(2)
    before = [(x.clone(), target.clone()) for x, target in given]
    losses(training(given))
    assert all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(given, before, strict=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "batches: expected at least one pair of input and target, got none"),
        (torch.ones(3), "batches: expected pairs of input and target, such as [(x, y)], got Tensor"),
        (
            [torch.ones(3)],
            "batch 0: expected a pair of input and target, or a mapping of keyword arguments, got Tensor",
        ),
        ([(torch.ones(8, 6),) * 3], "batch 0: expected a pair .* got tuple of 3"),
        ([(torch.ones(8, 6), 3)], "batch 0: target: expected a tensor, or tensors in a container, got int"),
        (
            [*batches(1), (torch.ones(5, 6), torch.ones(5, dtype=torch.long))],
            (
                "batch 1: expected tensors as in batch 0, float32 (8, 6), int64 (8,); got float32 (5, 6), int64 (5,): "
                "leave out the last batch"
            ),
        ),
    ],
)
def test_batches_that_are_none_are_named(given: Any, words: str) -> None:
    pattern = ".*".join(re.escape(part) for part in words.split(" .* "))
    with pytest.raises(OwnModelError, match=pattern):
        training(given)


def test_inputs_beside_batches_are_refused() -> None:
    with pytest.raises(
        OwnModelError, match="they have inputs and targets: give no inputs, keywords or target beside them"
    ):
        workload_of(Net(), (torch.ones(8, 6),), batches=batches(), loss=lambda out, _: out.loss, optimizer=sgd)


class Named(dict[str, Tensor]):
    """A container of its own, as models of transformers return; what is traced gives a plain dict back."""

    @property
    def scores(self) -> Tensor:
        return self["scores"]


class Naming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Named:
        return Named(scores=self.layer(x))


def test_a_loss_gets_the_models_own_container_whatever_a_technique_makes_of_it(fresh: Store) -> None:
    torch.manual_seed(0)
    workload = workload_of(
        Naming(),
        batches=batches(),
        loss=lambda out, target: functional.cross_entropy(out.scores, target),
        optimizer=sgd,
    )
    passed(fresh, Matrix.load().techniques["jit-trace"], workload, TRAIN)


class Telling(nn.Module):
    """Computes its loss itself, like models of transformers, and has a buffer that no state holds."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.layer(x) * self.scale
        return functional.cross_entropy(scores, labels), scores


@pytest.mark.parametrize(
    "name",
    [
        "ddp-2",
        "ddp-bf16-hook",
        "fsdp2",
        "elastic-restart",
        "snapshot-restore",
    ],
)
@pytest.mark.slow(after=1)
def test_other_processes_train_with_each_batch_and_a_loss_of_the_models_own(name: str, fresh: Store) -> None:
    torch.manual_seed(0)
    given = [{"x": x, "labels": labels} for x, labels in batches(2)]
    workload = workload_of(Telling(), batches=given, loss=lambda out, _: out[0], optimizer=sgd)
    passed(fresh, Matrix.load().techniques[name], workload, TRAIN)


@pytest.mark.parametrize(("name", "ranks"), [("ddp-3", 3), ("ddp-no-sync", 4)])
def test_a_batch_that_ranks_cannot_divide_is_unsupported(name: str, ranks: int, fresh: Store) -> None:
    torch.manual_seed(0)
    workload = training([(torch.randn(2, 6), torch.arange(2))])
    record = verdict_of(fresh, Matrix.load().techniques[name], workload, TRAIN)
    assert record.verdict is Verdict.UNSUPPORTED, record.why
    assert f"a batch for {ranks} ranks" in record.why


@pytest.mark.slow
def test_steps_so_large_that_rounding_decides_the_parameters_are_undecided(fresh: Store) -> None:
    record = verdict_of(fresh, Eager(), training(batches(), optimizer=partial(torch.optim.RMSprop, lr=1e8)), TRAIN)
    assert (record.verdict, record.code) == (Verdict.ERROR, ErrorCode.UNDECIDED)
    assert record.reason.endswith("rounding errors alone decide each of them; a smaller learning rate may help")
