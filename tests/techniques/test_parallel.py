"""Data-parallel training equals one process, over a real collective, and error feedback loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from technique_harness import StubDevice, differences, mlp, named, plain, run, trained, workload
from torch import Tensor, distributed, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.distributed.parallel import RANKS, TECHNIQUES, Account, Compressor, Ranks, Wire, by_samples
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcheck.techniques.base import Technique

TWO, THREE = named(TECHNIQUES, "data-parallel-2"), named(TECHNIQUES, "data-parallel-3")
COMPRESSED = named(TECHNIQUES, "data-parallel-compressed")


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire(3)
    yield made
    made.close()


def prepared(technique: Technique) -> Program:
    program = Program.of(mlp())
    technique.prepare(program, Mode.TRAIN, StubDevice())
    return program


@pytest.mark.parametrize("technique", [TWO, THREE], ids=lambda technique: technique.name)
def test_ranks_train_as_one_process(technique: Technique) -> None:
    # 8 samples: three ranks get 3, 3 and 2.
    ran = run(technique, mlp(), Mode.TRAIN)
    assert ran.engaged, ran.missing()
    assert not differences(ran.result, plain(mlp(), Mode.TRAIN), 1e-6)


def test_every_rank_counts_the_bytes_that_it_sends() -> None:
    ran = run(THREE, mlp(), Mode.TRAIN)
    elements = sum(parameter.numel() for parameter in ran.program.module.parameters())
    assert [one.observed for one in ran.evidence[:3]] == [3, "3, 3, 3", ", ".join([str(4 * 3 * elements)] * 3)]


def test_compression_halves_the_bytes_and_keeps_results_close() -> None:
    ran = run(COMPRESSED, mlp(), Mode.TRAIN)
    assert ran.engaged, ran.missing()
    elements = sum(parameter.numel() for parameter in ran.program.module.parameters())
    assert ran.evidence[2].observed == f"{6 * elements}, {6 * elements}"
    expected = plain(mlp(), Mode.TRAIN)
    assert differences(ran.result, expected, 1e-8)
    assert not differences(ran.result, expected, 1e-4)


def test_error_feedback_keeps_all_that_compression_drops() -> None:
    torch.manual_seed(0)
    compressor, account = Compressor(), Account(5)
    for _ in range(20):
        gradient = torch.randn(5) * torch.tensor([1.0, 1e-3, 1e-9, 7e4, 0.0])
        before = compressor.residual
        account.add(gradient, before, compressor.compress(gradient))
    assert not account.unbalanced(compressor.residual).any()
    assert account.unbalanced(None).tolist() == [True, True, True, True, False]


def test_a_compressor_without_error_feedback_fails_the_evidence() -> None:
    class Forgetful(Compressor):
        def compress(self, gradient: Tensor) -> Tensor:
            sent = super().compress(gradient)
            self.residual = None
            return sent

    program = prepared(COMPRESSED)
    program.extras[RANKS].exchange.make = Forgetful
    try:
        program.run(Mode.TRAIN)
        *_, invariant = COMPRESSED.evidence(program, StubLog("cpu"), Mode.TRAIN, StubDevice())
    finally:
        COMPRESSED.finish()
    assert not invariant.engaged
    assert "0.weight x" in str(invariant.observed)


class StubLog:
    """An empty log: the technique counts by itself."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the log is not asked, and was: {name}")


def test_a_training_starts_without_a_residual() -> None:
    program = prepared(COMPRESSED)
    before = [parameter.detach().clone() for parameter in program.module.parameters()]
    try:
        first = {path: tensor.clone() for path, tensor in program.run(Mode.TRAIN).items()}
        with torch.no_grad():
            for parameter, value in zip(program.module.parameters(), before, strict=True):
                parameter.copy_(value)
        assert not differences(program.run(Mode.TRAIN), first, 0.0)
    finally:
        COMPRESSED.finish()


def test_ranks_with_different_gradients_fail_the_evidence() -> None:
    program = prepared(TWO)
    ranks: Ranks = program.extras[RANKS]
    exchange = ranks.exchange
    ranks.exchange = lambda gradients, weights: [part + rank for rank, part in enumerate(exchange(gradients, weights))]  # type: ignore[assignment]  # a fault
    ranks.exchange.begin = exchange.begin  # type: ignore[method-assign]  # as above
    try:
        program.run(Mode.TRAIN)
        evidence = list(TWO.evidence(program, StubLog("cpu"), Mode.TRAIN, StubDevice()))
    finally:
        TWO.finish()
    assert [one.claim for one in evidence if not one.engaged] == ["steps after which ranks had different gradients = 0"]
    assert evidence[-1].observed == 3


def test_a_collective_reaches_every_rank(wire: Wire) -> None:
    sums = wire.together(lambda rank: wire.reduce(rank, torch.tensor([float(rank), 1.0])))
    assert [one.tolist() for one in sums] == [[3.0, 3.0]] * 3
    rows = wire.together(lambda rank: torch.stack(wire.gather(rank, torch.tensor([rank]).half())))
    assert [one.flatten().tolist() for one in rows] == [[0.0, 1.0, 2.0]] * 3
    assert (wire.collectives, wire.sent) == ([2] * 3, [10] * 3)


def test_uneven_shards_are_weighted_by_their_samples() -> None:
    assert by_samples([3, 3, 2]) == [0.375, 0.375, 0.25]


def test_a_parameter_without_gradients_gets_zeros() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    torch.manual_seed(0)
    problem = trained(Half(), torch.randn(4, 4), torch.randn(4, 2))
    ran = run(TWO, problem, Mode.TRAIN)
    assert ran.engaged, ran.missing()
    assert not ran.program.module.get_parameter("unused.weight").grad.any()  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize(("samples", "targets"), [(2, 2), (8, 4)])
def test_a_batch_that_cannot_be_split_is_refused(samples: int, targets: int) -> None:
    problem = trained(nn.Linear(4, 2), torch.randn(samples, 4), torch.randn(targets, 2))
    with pytest.raises(Unsupported, match="a batch for 3 ranks: expected inputs and a target of one first size"):
        run(THREE, problem, Mode.TRAIN)


def test_only_trainings_without_batch_norm_are_accepted() -> None:
    assert TWO.accepts(workload("training"))
    assert not TWO.accepts(workload("training", "batchnorm"))
    assert not TWO.accepts(workload("matmul"))
    assert all(technique.modes == {Mode.TRAIN} for technique in TECHNIQUES)


def test_without_gloo_there_is_no_data_parallel_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TWO.capability(StubDevice()).ok
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    assert TWO.capability(StubDevice()).code is Code.WRONG_VERSION
