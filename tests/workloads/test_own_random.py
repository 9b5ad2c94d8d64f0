"""Models that draw random numbers: these become inputs, so that every technique gets the same ones."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, erred, failed, passed
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.plant import calling
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads import own_random
from accelcheck.workloads.base import Workload
from accelcheck.workloads.own_model import workload_of
from accelcheck.workloads.own_random import Drawing


class Sampled(nn.Module):
    """Encoder, a Gaussian latent variable in training alone, functional dropout, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.encoder(x).chunk(2, -1)
        if self.training:
            mean = mean + torch.randn_like(deviation) * deviation.exp()
        out: Tensor = self.decoder(functional.dropout(mean, 0.5, self.training))
        return out


def sampled() -> Workload:
    torch.manual_seed(0)
    batches = [(torch.randn(5, 6), torch.randn(5, 6)) for _ in range(2)]
    words: dict[str, Any] = {"loss": functional.mse_loss, "optimizer": torch.optim.Adam, "batches": batches}
    return workload_of(Sampled(), name="sampled", **words)


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
def test_a_model_that_draws_numbers_is_judged(mode: Mode, store: Store) -> None:
    own = sampled()
    assert "whose random numbers are inputs" in own.summary
    passed(store, Eager(), own, mode)


def test_numbers_are_of_the_same_distribution_and_differ_between_draws_and_batches() -> None:
    own = sampled()
    first, other = own.problem(1), own.problem(2)
    assert [tuple(value.shape) for value in first.inputs] == [(5, 6), (5, 4)]
    drawn = [first.inputs[1], other.inputs[1], first.further[0][0][1]]
    assert len({tuple(value.flatten().tolist()) for value in drawn}) == 3
    assert torch.equal(own.problem(1).inputs[1], first.inputs[1])


def test_other_sizes_have_numbers_of_their_own() -> None:
    sizes = sampled().sizes
    assert sizes is not None
    shapes = [[tuple(value.shape) for value in other.problem(0).inputs] for other in sizes.workloads.values()]
    assert shapes == [[(6, 6), (6, 4)], [(1, 6), (1, 4)]]


def test_a_technique_that_uses_other_numbers_fails(store: Store) -> None:
    own = sampled()
    wrong = calling(lambda module, x, noise: module(x, noise.flip(0)))
    failed(store, Planted(wrong), own, BACKWARD)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
@pytest.mark.parametrize("name", ["compile-aot-eager", "export", "jit-trace"])
def test_translators_get_the_numbers(name: str, mode: Mode, store: Store) -> None:
    passed(store, Matrix.load().techniques[name], sampled(), mode)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape) + x,
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: x[torch.randperm(len(x))],
        lambda x: torch.normal(x, 1.0) + x,
        lambda x: x + torch.randint(3, (1,)),
        lambda x: functional.dropout(x),  # noqa: PLW0108 - looked up when it is called, as models do
        lambda x: dropout(x),  # noqa: PLW0108 - likewise, of a name that was imported before
    ],
)
def test_each_function_of_torch_that_draws_is_replaced(draw: Callable[[Tensor], Tensor], fresh: Store) -> None:
    own = workload_of(draw, (torch.randn(5, 4),), name="drawing", sizes=[])
    assert isinstance(own.problem(0).module, Drawing)
    passed(fresh, Eager(), own)


def test_numbers_are_handed_out_in_order_and_in_the_dtype_of_their_like(fresh: Store) -> None:
    own = workload_of(lambda x: (torch.rand(2), torch.randn_like(x.half())), (torch.randn(5, 4),), name="two", sizes=[])
    problem = own.problem(0)
    x, *numbers = problem.inputs
    first, second = problem.module(x, *(value.double() for value in numbers))
    assert torch.equal(first, numbers[0].double())
    assert torch.equal(second, numbers[1])
    assert second.dtype == torch.half


def test_a_method_that_draws_is_named_with_a_remedy(store: Store) -> None:
    own = workload_of(lambda x: x + torch.empty_like(x).normal_(), (torch.randn(5, 4),), name="method", sizes=[])
    assert "is random" in erred(store, Eager(), own).why


def test_functions_outside_of_such_a_model_draw_as_before() -> None:
    sampled()
    torch.manual_seed(3)
    one = torch.randn(4), functional.dropout(torch.ones(100), 0.5)
    torch.manual_seed(3)
    assert all(map(torch.equal, one, (torch.randn(4), functional.dropout(torch.ones(100), 0.5))))
    assert not one[1].all()


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of torch as in a process without such a model."""
    for owner, name, _ in [*own_random._REPLACED, (sys.modules[__name__], "dropout", None)]:
        monkeypatch.setattr(owner, name, getattr(getattr(owner, name), "__wrapped__", getattr(owner, name)))
    monkeypatch.setattr(own_random._NUMBERS, "needed", False)


@pytest.mark.usefixtures("untouched")
def test_functions_are_replaced_in_a_process_that_gets_such_a_model() -> None:
    pickled = pickle.dumps(Drawing(Sampled(), 1))
    own_random._NUMBERS.needed = False
    assert not own_random.draws(nn.Linear(4, 4), (torch.ones(4),))
    assert not hasattr(torch.randn, "__wrapped__")
    pickle.loads(pickled)
    assert hasattr(torch.randn, "__wrapped__")


class AddsInPlace(nn.Module):
    """Writes to what dropout returns, which in training is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        y += x
        return y


class WritesToReLU(AddsInPlace):
    """Writes to what the backward pass of ReLU needs, in training too."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net[1](self.net[0](x))
        out: Tensor = self.net[2](y.mul_(2.0) if self.training else y)
        return out


@pytest.mark.usefixtures("untouched")  # scripts of dropout need its function as it is
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
def test_a_model_that_writes_to_what_dropout_returns_is_judged(mode: Mode, fresh: Store) -> None:
    torch.manual_seed(0)
    model, x = AddsInPlace(), torch.randn(8, 4)
    training: dict[str, Any] = {
        "loss": functional.mse_loss,
        "target": torch.randn(8, 4),
        "optimizer": lambda own: torch.optim.SGD(own, 0.1),
    }
    workload = workload_of(model, (x,), name="adds", **training)
    passed(fresh, Eager(), workload, mode)
    failed(fresh, Planted(calling(lambda module, x: module(x) - 0.1 * x)), workload, mode)
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.usefixtures("untouched")
def test_a_model_that_cannot_be_trained_stays_an_error(fresh: Store) -> None:
    torch.manual_seed(0)
    erred(fresh, Eager(), workload_of(WritesToReLU(), (torch.randn(8, 4),), name="writes"), BACKWARD)


@pytest.mark.usefixtures("untouched")
def test_a_model_that_draws_nothing_leaves_torch_as_it_is() -> None:
    before = torch.randn, functional.dropout, dropout
    assert "scriptable" in workload_of(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), (torch.randn(5, 4),)).traits
    assert (torch.randn, functional.dropout, dropout) == before
