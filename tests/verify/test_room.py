"""A model whose oracle exceeds the available memory is judged by layers, to the same bits, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fault_harness import Planted, case
from torch import Tensor, nn

from accelcheck.core.case import Mode, stable_seed
from accelcheck.selftest.faults.plant import nothing
from accelcheck.verify import room
from accelcheck.verify.oracle import compute
from accelcheck.verify.oracle_runs import Source
from accelcheck.verify.reference import OracleError
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.own_model import workload_of

PLAIN = Planted(nothing)


@pytest.fixture(autouse=True)
def unfused() -> Iterator[None]:
    """Without a fused operator of whole encoder layers, which torch takes only where no layer has hooks."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


class Encoder(nn.Module):
    """Tied embeddings, attention whose projection is not called, a parameter of the whole, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)
        self.place = nn.Parameter(torch.randn(6, 24))
        self.block = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True)
        self.conv = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6))
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.conv(self.block(self.table(tokens) + self.place)))
        return result


def encoder() -> Workload:
    torch.manual_seed(0)
    return workload_of(Encoder(), (torch.arange(12).reshape(2, 6),), name="encoder", traits=frozenset())


def bytes_of(workload: Workload) -> int:
    return 8 * sum(parameter.numel() for parameter in workload.problem(0).module.parameters())


def little(monkeypatch: pytest.MonkeyPatch, workload: Workload, parts: float) -> None:
    """Have so many times the model in FP64 as memory."""
    monkeypatch.setattr(room, "available", lambda: int(parts * bytes_of(workload) / room.PART))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_by_layer_the_oracle_has_the_bits_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    workload = encoder()
    whole = compute(Source(workload, PLAIN, stable_seed("encoder"), dtype, Mode.FORWARD))
    called: list[Program] = []
    by_layer = room.by_layer

    def watched(program: Program) -> Program:
        called.append(program)
        return by_layer(program)

    monkeypatch.setattr(room, "by_layer", watched)
    little(monkeypatch, workload, 1.4)
    lean = compute(Source(workload, PLAIN, stable_seed("encoder"), dtype, Mode.FORWARD))
    assert called
    assert torch.equal(whole.truth["out"], lean.truth["out"])
    assert whole.budgets == lean.budgets
    assert whole.leanings == lean.leanings
    assert whole.eager == lean.eager


def test_only_the_layer_that_runs_is_in_fp64() -> None:
    workload = encoder()
    program = room.by_layer(Program.of(workload.problem(0)))
    widest: list[int] = []
    for part in program.module.modules():
        part.register_forward_pre_hook(
            lambda *_: widest.append(sum(p.numel() for p in program.module.parameters() if p.dtype == torch.float64))
        )
    assert program.run(Mode.FORWARD)["out"].dtype == torch.float64
    elements = {name: p.numel() for name, p in program.module.named_parameters()}
    attention = sum(count for name, count in elements.items() if "self_attn" in name)
    assert 0 < max(widest) <= elements["place"] + attention < sum(elements.values()) / 2
    assert {name for name, p in program.module.named_parameters() if p.dtype == torch.float64} == {"place"}


def test_an_oracle_that_fits_is_run_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = encoder()
    program = Program.of(workload.problem(0))
    little(monkeypatch, workload, 1.51)
    assert not room.layered(program, Mode.FORWARD)
    little(monkeypatch, workload, 1.49)
    assert room.layered(program, Mode.FORWARD)


@pytest.mark.parametrize(("mode", "parts"), [(Mode.FORWARD, 0.9), (Mode.BACKWARD, 4.4)])
def test_a_model_whose_oracle_does_not_fit_is_told_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, parts: float
) -> None:
    workload = encoder()
    little(monkeypatch, workload, parts)
    with pytest.raises(
        OracleError, match=r"encoder \(draw 0\).* needs about .* GB .* parameters, and .* GB may be taken"
    ):
        compute(Source(workload, PLAIN, case(workload).seed, "float32", mode))
