"""DistributedDataParallel, FSDP2 and gradient compression in real processes: correct and faulty ones, and evidence."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import bench, case, faults
from rank_strategies import Apart, ByPlace, Early, Forgetful, Summing, Truncating, ranked, small
from technique_harness import StubDevice, differences, mlp, named, plain, workload
from torch import Tensor, distributed

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults.base import Planted
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed import data_parallel as plain_variants
from accelcheck.techniques.distributed import hooks
from accelcheck.techniques.distributed.compression import ErrorFeedback, HalfPrecision, Int8, PowerSgd, TopK, worthwhile
from accelcheck.techniques.distributed.data_parallel import ANSWERS, SMALL_BUCKET, STRATEGY
from accelcheck.techniques.distributed.ddp import Exchange, Replicated
from accelcheck.techniques.distributed.hook_oracles import Halves, Integers, Largest, LowRank, Scheme, shared_out
from accelcheck.techniques.distributed.strategy import RankReport, Strategy
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Workload

TECHNIQUES = (*plain_variants.TECHNIQUES, *hooks.TECHNIQUES)


def judged(store: Store, name: str, workload: Workload, strategy: Strategy | None = None) -> Record:
    """The engine's record of a technique; with `strategy`, its ranks run that one instead."""
    technique: Technique = named(TECHNIQUES, name)
    if strategy is not None:
        technique = Planted(technique, lambda program: program.extras.update({STRATEGY: strategy}))
    return bench(store, technique, workload, Cpu()).run(case(workload, Mode.TRAIN, technique=name))


def absent(record: Record) -> list[str]:
    """Claims of evidence that failed."""
    return [entry.claim for entry in record.evidence if not entry.engaged]


@pytest.mark.slow
@pytest.mark.parametrize("name", [technique.name for technique in TECHNIQUES])
def test_each_technique_trains_as_its_oracle(store: Store, name: str) -> None:
    record = judged(store, name, small())
    assert record.verdict is Verdict.PASS, record.why
    assert record.compared > 1000


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_fault_32_a_sum_in_place_of_a_mean_fails(store: Store, world: int) -> None:
    name, right = f"ddp-{world}", sum(range(world)) / world
    assert judged(store, name, ranked(world)).verdict is Verdict.PASS
    record = judged(store, name, ranked(world), Replicated(bucket_mb=SMALL_BUCKET, exchange=Summing()))
    assert record.verdict is Verdict.FAIL
    assert "view row" in faults(record)["parameter:w"]
    # Two steps from 8 subtract twice the mean, or twice the sum.
    for strategy, ends in ((Replicated(), 8 - 2 * right), (Replicated(exchange=Summing()), 8 - 2 * right * world)):
        program = Program.of(ranked(world).problem(0))
        named(TECHNIQUES, name).prepare(program, Mode.TRAIN, Cpu())
        program.extras[STRATEGY] = strategy
        assert program.run(Mode.TRAIN)["parameter:w"].tolist() == [ends] * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("ddp-topk", Forgetful(TopK(hooks.SHARE))),
        ("ddp-int8", Forgetful(Int8())),
        ("ddp-powersgd", PowerSgd(hooks.THIN, hooks.RATE, feedback=False)),
    ],
)
def test_fault_33_compression_without_error_feedback_fails(store: Store, name: str, exchange: Exchange) -> None:
    record = judged(store, name, small(), Replicated(exchange=exchange))
    assert record.verdict is Verdict.FAIL
    # Both the invariant and the values fail; either is enough.
    assert absent(record) == ["elements whose sum sent and residual are not the sum of their gradients = 0"]
    assert {"view row", "view element"} <= faults(record)["parameter:0.weight"]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        ("ddp-int8", ErrorFeedback(Truncating())),
        ("ddp-topk", ByPlace(TopK(hooks.SHARE))),
        ("ddp-fp16-hook", HalfPrecision(torch.bfloat16)),
    ],
    ids=["rounds towards zero", "residuals by place in a bucket that is made anew", "the other 16 bits"],
)
def test_another_compression_fails_by_its_values(store: Store, name: str, exchange: Exchange) -> None:
    record = judged(store, name, small(), Replicated(exchange=exchange))
    assert record.verdict is Verdict.FAIL
    assert "view row" in faults(record)["parameter:0.weight"]


def test_ranks_that_never_exchange_fail(store: Store) -> None:
    record = judged(store, "ddp-2", small(), Apart(bucket_mb=SMALL_BUCKET))
    assert record.verdict is Verdict.FAIL
    assert "parameters that differ between ranks = 0" in absent(record)
    assert "bytes sent by each rank = 8760" in absent(record)


@pytest.mark.slow
def test_accumulation_that_exchanges_each_time_fails_the_evidence(store: Store) -> None:
    record = judged(store, "ddp-no-sync", small(), Early())
    assert record.verdict is Verdict.FAIL
    assert absent(record) == [
        "bytes sent by each rank = 8760",
        "all-reduces of each first pass = 0, of each second one >= 1",
    ]


def answered(facts: dict[str, Any] | None = None, **changes: Any) -> list[RankReport]:
    """The answers of two ranks for the small training, those of rank 1 with changes."""
    good = RankReport(
        pid=os.getpid() + 1,
        backend="gloo",
        result={},
        digests={"parameter:0.weight": "a", "parameter:2.bias": "b"},
        calls=[{"allreduce_": 1}] + [{"allreduce_": 2}] * 5,
        sent=[1460] * 6,
        facts=facts or {},
    )
    return [good, replace(good, pid=good.pid + 1, **changes)]


def shown(name: str, answers: Sequence[RankReport]) -> list[Evidence]:
    program = Program.of(small().problem(0))
    program.extras[ANSWERS] = answers
    return list(named(TECHNIQUES, name).evidence(program, None, Mode.TRAIN, Cpu()))  # type: ignore[arg-type]  # unused


VIEWS = {"storages": [1, 2, 2, 2, 2, 2]}
PASSES = {"storages": [4] * 6, "passes": [0, 1] * 6}
SHARDS = {"sharded": 4, "bytes held": 730}
GATHERED = [{"_allgather_base_": 4, "_reduce_scatter_base_": 2}] * 6
HOOK = {"hook calls": 11, "averaged": 11}
FED = {"hook calls": 6, "lost": {}, "accounts": 4}
FSDP = {"facts": SHARDS, "calls": GATHERED, "sent": [2190] * 6}


@pytest.mark.parametrize(
    ("name", "good", "wrong", "claim"),
    [
        ("ddp-2", {}, {"pid": os.getpid()}, "processes that trained = 2"),
        ("ddp-2", {}, {"digests": {"parameter:0.weight": "a", "parameter:2.bias": "c"}}, "parameters that differ"),
        ("ddp-2", {}, {"sent": [1460] * 5 + [1456]}, "bytes sent by each rank = 8760"),
        ("ddp-2", {}, {"calls": [{"allreduce_": 2}] * 5 + [{"allreduce_": 1}]}, "all-reduces of a step"),
        ("ddp-bucket-view", {"facts": VIEWS}, {}, ""),
        ("ddp-no-sync", {"facts": PASSES}, {"facts": {"passes": [0, 1] * 5 + [1, 1]}},
            "all-reduces of each first pass"),
        ("ddp-no-sync", {"facts": PASSES}, {"facts": {"passes": [0, 1] * 5 + [0, 0]}},
            "all-reduces of each first pass"),
        ("fsdp2", FSDP, {"facts": {"sharded": 3, "bytes held": 730}}, "sharded parameters = 4"),
        ("fsdp2", FSDP, {"facts": {"sharded": 4, "bytes held": 1460}}, "bytes of parameters that ranks hold"),
        ("fsdp2", FSDP, {"calls": [{"_allgather_base_": 4}] * 6}, "reduce_scatter_base of each step"),
        ("fsdp2", FSDP, {"calls": [{"_reduce_scatter_base_": 4}] * 6}, "allgather_base of each step"),
        ("fsdp2", FSDP, {"sent": [1460] * 6}, "bytes sent by each rank > 8760"),
        ("ddp-async", {"facts": HOOK}, {"facts": {"hook calls": 5, "averaged": 5}}, "hook calls of each rank"),
        ("ddp-async", {"facts": HOOK}, {"facts": {"hook calls": 11, "averaged": 10}}, "buckets averaged in a future"),
        ("ddp-fp16-hook", {"facts": FED, "sent": [730] * 6}, {"sent": [1460] * 6}, "bytes sent by each rank = 4380"),
        ("ddp-int8", {"facts": FED, "sent": [369] * 6}, {"facts": FED | {"lost": {"2.bias": 1}}}, "elements whose sum"),
        ("ddp-int8", {"facts": FED, "sent": [369] * 6}, {"facts": FED | {"accounts": 3}}, "elements whose sum"),
        ("ddp-topk", {"facts": FED, "sent": [360] * 6}, {"sent": [361] * 6}, "bytes sent by each rank = 2160"),
        ("ddp-powersgd", {"facts": FED, "sent": [1460] * 2 + [328] * 4}, {"sent": [1460] * 6},
            "bytes sent by each rank = 4232"),
    ],
)  # fmt: skip
def test_each_observation_can_fail(name: str, good: dict[str, Any], wrong: dict[str, Any], claim: str) -> None:
    assert all(entry.engaged for entry in shown(name, [replace(answer, **good) for answer in answered()]))
    first, second = (replace(answer, **good) for answer in answered())
    missed = [entry.claim for entry in shown(name, [first, replace(second, **wrong)]) if not entry.engaged]
    assert [text for text in missed if text.startswith(claim)] or not claim


def test_copied_gradients_are_no_views() -> None:
    copies = [replace(answer, facts={"storages": [4] * 6}) for answer in answered()]
    assert [entry.observed for entry in shown("ddp-bucket-view", copies) if not entry.engaged] == ["4, 4, 4, 4, 4, 4"]


class Mean(Scheme):
    """A scheme without compression."""

    def __call__(self, ranks: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        return [torch.stack(of_all).mean(0) for of_all in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "make", [Mean, partial(Largest, 1.0), partial(LowRank, 2**20, 0.0)], ids=["mean", "all elements", "full rank"]
)
def test_an_oracle_without_compression_equals_the_plain_one(make: Callable[[], Scheme], world: int) -> None:
    # 8 samples: three ranks get 3, 3 and 2.
    program = Program.of(mlp(), dtype=torch.float64)
    program.steps = 5  # PowerSGD starts after two steps
    expected = Program.of(mlp(), dtype=torch.float64)
    expected.steps = 5
    program.module = shared_out(program.module, world, make())
    assert not differences(program.run(Mode.TRAIN), expected.run(Mode.TRAIN), 1e-12)


@pytest.mark.parametrize(
    "scheme", [Largest(0.1), Integers(), LowRank(1, 2.0), Halves(torch.bfloat16)], ids=lambda s: type(s).__name__
)
def test_an_oracle_that_compresses_restarts_with_the_state(scheme: Scheme) -> None:
    program = Program.of(mlp(), dtype=torch.float64)
    program.steps = 5
    program.module = shared_out(program.module, 2, scheme)
    state = {name: value.clone() for name, value in program.module.state_dict().items()}
    first = {path: tensor.clone() for path, tensor in program.run(Mode.TRAIN).items()}
    program.module.load_state_dict(state)
    assert not differences(program.run(Mode.TRAIN), first, 0.0)
    assert differences(first, plain(mlp(), Mode.TRAIN, torch.float64), 1e-6)


def test_the_residual_is_what_a_scheme_drops() -> None:
    generator = torch.Generator().manual_seed(0)
    scheme = Largest(0.25)
    gradients = [torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(12)]
    wanted = torch.stack(gradients).sum(0)
    sent = torch.stack([scheme([[gradient]])[0] for gradient in gradients]).sum(0)
    assert not torch.equal(sent, wanted)
    rest = torch.stack([scheme([[torch.zeros_like(wanted)]])[0] for _ in range(4)]).sum(0)
    torch.testing.assert_close(sent + rest, wanted)


@pytest.mark.parametrize(
    ("scheme", "close"),
    [
        (Largest(0.5), [1.0, 1.0]),
        (Integers(), [127.0, 0.5 + 1e-9]),
        (Halves(torch.float16), [1.0, 1.0 + 2.0**-11 + 1e-9]),
    ],
    ids=["equal elements", "a tie of integers", "a tie of 16 bits"],
)
def test_close_decisions_fall_both_ways_in_each_pair_of_runs(scheme: Scheme, close: list[float]) -> None:
    gradient = torch.tensor(close, dtype=torch.float64)
    scheme.begin()
    exact = scheme([[gradient]])[0]
    scheme.flips = True
    for _ in range(3):
        ends = []
        for _ in range(2):
            scheme.begin()
            ends.append(scheme([[gradient]])[0].round(decimals=3).tolist())
        assert ends[0] != ends[1]
        assert exact.round(decimals=3).tolist() in ends


def test_codecs_decode_what_they_encode() -> None:
    wanted = torch.tensor([0.5, -4.0, 0.0, 1.0, 3.0])
    assert TopK(0.4).decode(TopK(0.4).encode(wanted), 5).tolist() == [0.0, -4.0, 0.0, 0.0, 3.0]
    integers, scale = Int8().encode(wanted)
    assert integers.tolist() == [16, -127, 0, 32, 95]
    assert scale.item() == pytest.approx(4 / 127)
    assert Int8().decode((integers, scale), 5)[1].item() == pytest.approx(-4.0)
    assert Int8().decode(Int8().encode(torch.zeros(3)), 3).tolist() == [0.0] * 3


def test_powersgd_compresses_only_large_matrices() -> None:
    sizes = {(64, 48): 112, (64,): 0, (10, 64): 74, (3, 2): 0, (4, 3, 5, 5): 79}
    assert {shape: worthwhile(torch.Size(shape), 1, 2.0) for shape in sizes} == sizes


def test_only_trainings_that_are_equal_on_every_rank_are_accepted() -> None:
    for technique in TECHNIQUES:
        assert technique.accepts(workload("training"))
        assert not technique.accepts(workload("training", "batchnorm"))
        assert not technique.accepts(workload("training", "branching"))
        assert not technique.accepts(workload("matmul"))
        assert technique.modes == {Mode.TRAIN}


def test_each_rank_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    three = named(TECHNIQUES, "ddp-3")
    assert three.capability(Cpu()).ok
    assert three.capability(StubDevice("xla")).code is Code.NO_BACKEND
    assert three.capability(StubDevice("meta")).code is Code.NO_BACKEND
    monkeypatch.setattr(distributed, "is_backend_available", lambda backend: backend != "nccl")
    assert three.capability(StubDevice("cuda")).code is Code.WRONG_BUILD
    monkeypatch.setattr(distributed, "is_backend_available", lambda _: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert named(TECHNIQUES, "ddp-2").capability(StubDevice("cuda")).ok
    answer = three.capability(StubDevice("cuda"))
    assert (answer.verdict, answer.code) == (Verdict.UNAVAILABLE, Code.NO_HARDWARE)
    assert answer.reason == "3 ranks need 3 devices, stub shows 2"
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    assert three.capability(Cpu()).code is Code.WRONG_VERSION
