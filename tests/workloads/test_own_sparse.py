"""Models of one's own with sparse tensors: a graph's edges as a buffer or an input, and gradients of few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, failed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.devices.layouts import parts
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.quantization.torchao import TECHNIQUES as TORCHAO
from accelcheck.techniques.runtimes.onnx import OnnxRuntime
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload
from accelcheck.workloads.own_inputs import redrawn
from accelcheck.workloads.own_model import workload_of

NODES, WIDTH = 12, 32
LAYOUTS = ("coo", "csr", "csc")


def edges(layout: str) -> Tensor:
    """Makes a sparse matrix of weighted edges, among them each node's with itself."""
    torch.manual_seed(0)
    dense = (torch.rand(NODES, NODES) > 0.7).float() * torch.rand(NODES, NODES) + torch.eye(NODES)
    out: Tensor = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"))
    return out


class Held(nn.Module):
    """Graph convolution whose edges are a buffer."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.register_buffer("edges", edges(layout))
        self.linear = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.edges @ self.linear(x)
        return out


class Given(nn.Module):
    """Graph convolution whose edges are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 16)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        out: Tensor = edges @ self.linear(x)
        return out


class FewRows(nn.Module):
    """Embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.table(index).mean(1)
        return out


def graph(layout: str, *, held: bool) -> Workload:
    torch.manual_seed(1)
    x = torch.randn(NODES, WIDTH)
    return (
        workload_of(Held(layout), (x,), name="graph")
        if held
        else workload_of(Given(), (edges(layout), x), name="graph")
    )


def bags(**training: Any) -> Workload:
    torch.manual_seed(1)
    return workload_of(FewRows(), (torch.randint(40, (6, 5)),), name="bags", **training)


def one_edge_lost(module: Any, *inputs: Tensor) -> Tensor:
    """Leaves out the edge of the last node with itself."""
    own = inputs[0] if len(inputs) == 2 else module.edges
    x = module.linear(inputs[-1])
    last = torch.zeros_like(x)
    last[-1] = own.to_dense()[-1, -1] * x[-1]
    out: Tensor = module(*inputs) - last
    return out


@pytest.mark.slow
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_sparse_edges_is_judged(layout: str, held: bool, fresh: Store) -> None:
    for mode in (FORWARD, BACKWARD):
        passed(fresh, Eager(), graph(layout, held=held), mode)
    passed(fresh, Planted(nothing), graph(layout, held=held), FORWARD)
    failed(fresh, Planted(calling(one_edge_lost)), graph(layout, held=held), FORWARD)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_draws_have_the_same_places_and_other_entries(layout: str) -> None:
    given = edges(layout)
    drawn = redrawn(given, torch.Generator().manual_seed(3))
    (own, *places), (other, *same) = parts(given), parts(drawn)
    assert all(map(torch.equal, places, same))
    assert not torch.equal(own, other)
    assert torch.equal(own.sort().values, other.sort().values)


def test_a_sparse_gradient_is_judged(fresh: Store) -> None:
    passed(fresh, Eager(), bags(), BACKWARD)

    def once(module: Any, index: Tensor) -> Tensor:
        """Adds the gradient of a row that occurs twice once."""
        rows = module.table(index)
        return torch.where((index == index[:, :1]).cumsum(1).unsqueeze(-1) > 1, rows.detach(), rows).mean(1)

    failed(fresh, Planted(calling(once)), bags(), BACKWARD)


def test_a_training_with_sparse_gradients_is_judged(fresh: Store) -> None:
    training = {
        "loss": nn.functional.mse_loss,
        "target": torch.randn(6, 8),
        "optimizer": lambda own: torch.optim.SGD(own, 0.1),
    }
    passed(fresh, Eager(), bags(**training), TRAIN)


def test_a_runtime_refuses_a_sparse_input(fresh: Store) -> None:
    pytest.importorskip("onnxruntime")
    record = verdict_of(fresh, OnnxRuntime(), graph("coo", held=False), FORWARD)
    assert (record.verdict, record.code) == (Verdict.UNSUPPORTED, Code.NO_FEATURE), record
    assert "an input is sparse" in record.reason


def test_weights_beside_a_sparse_buffer_are_counted(fresh: Store) -> None:
    technique = next(own for own in TORCHAO if own.name == "int8-torchao-weight-only")
    passed(fresh, technique, graph("coo", held=True), FORWARD)
