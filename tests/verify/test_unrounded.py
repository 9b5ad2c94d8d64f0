"""Decisions about values that follow from integers alone are eager's own, whatever rounding errors the rest has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, passed
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.plant import calling
from accelcheck.techniques.eager import Eager
from accelcheck.verify.oracle import Store
from accelcheck.verify.rounding import Rounding
from accelcheck.workloads.own_model import workload_of

DATA = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def bucket(distance: Tensor) -> Tensor:
    """Buckets of distances that grow with them: at 16, 32 and 64 the logarithm is a whole number."""
    scaled = torch.log(distance.float() / 8) / torch.log(torch.tensor(16.0)) * 8
    return torch.where(distance < 8, distance, (8 + scaled.long()).clamp(max=15))


def written_to(data: Tensor) -> Tensor:
    constant = torch.zeros(5, dtype=data.dtype)
    part = constant[1:3]
    part.copy_(data[:2])
    return constant > 0


def overwritten(data: Tensor) -> Tensor:
    constant = torch.ones(5, dtype=data.dtype)
    constant.mul_(data)
    return constant > 0


def read(data: Tensor) -> Tensor:
    steps = torch.arange(1, 6).float() * 16
    data.add_(steps)  # a constant that is read is one still
    return bucket(steps)


def drawn(data: Tensor) -> Tensor:
    torch.manual_seed(0)
    return torch.stack([torch.rand(5), torch.empty(5).bernoulli_(0.5)]) > 0.5


def in_place(data: Tensor) -> Tensor:
    constant = torch.arange(1, 130).float()
    constant.div_(8.0).log_().div_(torch.tensor(16.0).log()).mul_(8.0)
    return constant.long()


def sampled(function: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    with torch.no_grad(), Rounding("float32", "float32", torch.Generator().manual_seed(seed)):
        return function(DATA.clone())


@pytest.mark.parametrize(
    "function", [lambda _: bucket(torch.arange(1, 130)), written_to, overwritten, read, drawn, in_place]
)
def test_decisions_about_constants_are_eagers(function: Callable[[Tensor], Tensor]) -> None:
    truth = function(DATA.clone())
    assert all(torch.equal(sampled(function, seed), truth) for seed in range(20))


@pytest.mark.parametrize(
    "function",
    [
        lambda _: torch.arange(1, 6).double().log(),
        lambda data: (data * 1e10).long(),
        lambda data: ((data * 1e10).floor() / 2).frac() > 0.2,
    ],
    ids=["a constant itself", "a cast of data", "a comparison of data"],
)
def test_constants_themselves_and_decisions_about_data_err(function: Callable[[Tensor], Tensor]) -> None:
    truth = function(DATA.clone())
    assert not all(torch.equal(sampled(function, seed), truth) for seed in range(20))


class Biased(nn.Module):
    """Attention with a learned bias for each bucket of distances, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.bias = nn.Linear(8, 24), nn.Embedding(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.bias(bucket((place[None] - place[:, None]).abs()))[..., 0]
        q, k, v = self.project(x).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_attention_with_buckets_of_distances_is_judged(mode: Mode, fresh: Store) -> None:
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(1))
    workload = workload_of(Biased(), (x,))
    passed(fresh, Eager(), workload, mode)

    def moved(module: nn.Module, given: Tensor) -> Tensor:
        weight = module.get_parameter("bias.weight")
        with torch.no_grad():
            weight[10] = weight[9]  # the bucket from 16 on is that before it
        out: Tensor = module(given)
        return out

    failed(fresh, Planted(calling(moved)), workload, mode)
