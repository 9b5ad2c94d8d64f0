"""Models and collectives between real ranks: right ones pass, planted faults fail, and evidence can be missing."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from fault_harness import bench, built_in, case
from technique_harness import StubDevice, agrees, differences, named, plain, run, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults import parallel
from accelcheck.selftest.faults.base import Planted
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.distributed import collectives, expert_parallel, model_parallel
from accelcheck.techniques.distributed.data_parallel import ANSWERS
from accelcheck.techniques.distributed.expert_parallel import TAKEN
from accelcheck.techniques.distributed.sharing import cuts, in_flight
from accelcheck.techniques.distributed.strategy import RankReport
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.collectives import BUNDLES, Collective, uneven
from accelcheck.workloads.experts import CAPACITY, Experts

TECHNIQUES = (*model_parallel.TECHNIQUES, *expert_parallel.TECHNIQUES, *collectives.TECHNIQUES)
FAULTS = {fault.name: fault for fault in parallel.FAULTS if "ranks" not in fault.name}
QUICK = {"tensor-parallel": "mlp-blocks", "expert-parallel": "experts", "pipeline-1f1b": "train-mlp"}


def made(name: str) -> Problem:
    return built_in()[name].problem(0)


@pytest.mark.parametrize(("name", "subject"), QUICK.items())
def test_two_ranks_compute_what_one_process_does(name: str, subject: str) -> None:
    mode = Mode.TRAIN if subject.startswith("train") else Mode.BACKWARD
    agrees(named(TECHNIQUES, name), lambda: made(subject), mode, Cpu())


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    [technique for technique in TECHNIQUES if technique.capability(Cpu()).ok],
    ids=lambda technique: technique.name,
)
def test_ranks_compute_what_one_process_does(technique: Technique) -> None:
    for name in sorted(technique.workloads - {"attention-causal"}):
        if name.startswith(("all-gather", "all-to-all", "point-to-point")):
            continue  # gloo refuses some of their calls, and `agrees` cannot compare empty tensors
        for mode in sorted(technique.modes & built_in()[name].modes):
            agrees(technique, partial(made, name), mode, Cpu(), tolerance=3e-6)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["bias-on-every-rank", "tokens-swapped", "micro-batch-dropped"])
def test_a_fault_in_the_ranks_shows(name: str) -> None:
    fault, (cell, *_) = FAULTS[name], FAULTS[name].cells
    technique = Planted(named(TECHNIQUES, str(fault.technique)), fault.plant(1.0))
    ran = run(technique, made(cell.workload), cell.mode, Cpu())
    assert ran.engaged, ran.missing()  # it is the values that are wrong
    assert differences(ran.result, plain(made(cell.workload), cell.mode), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith("backward")])
def test_the_verdict_of_each_fault_is_fail(store: Store, name: str) -> None:
    fault, (cell, *_) = FAULTS[name], FAULTS[name].cells
    technique = Planted(named(TECHNIQUES, str(fault.technique)), fault.plant(1.0))
    subject = built_in()[cell.workload]
    record = bench(store, technique, subject, Cpu()).run(case(subject, cell.mode, technique=technique.name))
    assert record.verdict is Verdict.FAIL, record.why


@pytest.mark.slow
@pytest.mark.parametrize("name", ["point-to-point-3", "all-gather-3"])
def test_calls_that_torch_refuses_are_named_and_the_others_judged(store: Store, name: str) -> None:
    subject = built_in()[name]
    technique = named(TECHNIQUES, "collectives-3")
    record = bench(store, technique, subject, Cpu()).run(case(subject, Mode.FORWARD, technique=technique.name))
    assert record.verdict is Verdict.PASS, record.why
    assert "has to be contiguous" in str(record.refused) or "invalid tensor size" in str(record.refused)


def answered(name: str, seen: dict[str, int], told: dict[str, Any], **changes: Any) -> list[RankReport]:
    world: int = named(TECHNIQUES, name).world  # type: ignore[attr-defined]  # of RankedTraining
    first = RankReport(os.getpid() + 1, "gloo", {}, {"out": "a"}, [seen], (), told)
    return [first, *(replace(first, pid=first.pid + rank, **changes) for rank in range(1, world))]


def missing(name: str, subject: str, answers: list[RankReport], taken: int = 6) -> list[str]:
    program, log = Program.of(made(subject)), cast("Any", None)
    program.extras |= {ANSWERS: answers, TAKEN: taken}
    shown: list[Evidence] = list(named(TECHNIQUES, name).evidence(program, log, Mode.BACKWARD, Cpu()))
    return [entry.claim for entry in shown if not entry.engaged]


HELD = {"elements": {f"{name}.weight": size for name, size in (("fc1", 1536), ("fc2", 2048), ("fc3", 320))}}
SENT = {"c10d::send": 16, "c10d::recv_": 16}
STAGES = {"orders": {0: "FFBFBFBB" * 4}, "owners": {0: 4, 1: 2}}
RIGHT = {**STAGES, "orders": {1: "FB" * 16}}
ROUTED = {"sent": [[1, 2]], "padded": 3, "elements": {"up": 768}}
EXCHANGED = {"c10d::alltoall_base_": 5, "c10d::allreduce_": 1}
GATHERED = {"c10d::_allgather_base_": 1}
SHARDED = {**GATHERED, "c10d::_reduce_scatter_base_": 1}
WHOLE = {"elements": {**HELD["elements"], "fc1.weight": 3072}}
MOVED = {"c10d::allgather_": len(BUNDLES["all-gather"])}


@pytest.mark.parametrize(
    ("name", "subject", "calls", "facts", "wrong", "claim"),
    [
        ("tensor-parallel", "train-mlp", {"c10d::allreduce_": 1}, HELD, {"digests": {"out": "b"}}, "parameters that"),
        ("tensor-parallel", "train-mlp", {"c10d::allreduce_": 1}, HELD, {"calls": [{}]}, "allreduce of each rank"),
        ("tensor-parallel", "train-mlp", {"c10d::allreduce_": 1}, HELD, {"facts": WHOLE}, "weights of layers in parts"),
        ("tensor-parallel", "train-mlp", {"c10d::allreduce_": 1}, HELD, {"facts": WHOLE}, "parameters in parts"),
        ("compiled-fsdp2", "train-mlp", SHARDED, {**HELD, "graphs": 1}, {"facts": {**HELD, "graphs": 0}}, "graphs"),
        ("pipeline-1f1b", "train-mlp", SENT, STAGES, {"facts": {**RIGHT, "orders": {1: "FB" * 15}}}, "stages that ran"),
        ("pipeline-1f1b", "train-mlp", SENT, STAGES, {"facts": {**RIGHT, "orders": {1: "FFBB" * 8}}}, "most micro"),
        ("pipeline-1f1b", "train-mlp", SENT, STAGES, {"facts": {**RIGHT, "owners": {0: 6}}}, "ranks with parameters"),
        ("pipeline-1f1b", "train-mlp", SENT, STAGES, {"calls": [{"c10d::send": 16}]}, "recv of each rank"),
        ("expert-parallel", "experts", EXCHANGED, ROUTED, {"facts": {**ROUTED, "sent": [[1, 1]]}}, "tokens that ranks"),
        ("expert-parallel", "experts", EXCHANGED, ROUTED, {"facts": {**ROUTED, "elements": {"up": 9}}}, "elements of"),
        ("expert-parallel-grouped", "experts", EXCHANGED, ROUTED, {"facts": {**ROUTED, "padded": 0}}, "rows of zeros"),
        ("context-parallel-allgather", "attention", GATHERED, {"lengths": [24]}, {"facts": {"lengths": [48]}},
         "positions of"),
        ("collectives-3", "all-gather-3", MOVED, {"strided": 1}, {"calls": [{}]}, "collectives of each rank"),
        ("collectives-3", "all-gather-3", MOVED, {"strided": 1}, {"facts": {"strided": 0}}, "tensors with gaps"),
        ("collectives-3", "all-gather-3", MOVED, {"strided": 1}, {"digests": {"out": "b"}}, "calls that gave"),
    ],
)  # fmt: skip
def test_each_observation_can_fail(
    name: str, subject: str, calls: dict[str, int], facts: dict[str, Any], wrong: dict[str, Any], claim: str
) -> None:
    good: dict[str, Any] = {"facts": RIGHT} if facts is STAGES else {}
    assert not missing(name, subject, answered(name, calls, facts, **good))
    lacking = missing(name, subject, answered(name, calls, facts, **{**good, **wrong}))
    assert [text for text in lacking if text.startswith(claim)]


@pytest.mark.parametrize(
    ("sent", "taken", "claim"), [([2, 2], 8, "different numbers of tokens"), ([1, 40], 82, "tokens over an expert's")]
)
def test_experts_that_get_all_tokens_or_equal_numbers_are_no_evidence(sent: list[int], taken: int, claim: str) -> None:
    answers = answered("expert-parallel", EXCHANGED, {**ROUTED, "sent": [sent]})
    (lacking,) = missing("expert-parallel", "experts", answers, taken)
    assert lacking.startswith(claim)


def test_a_run_without_ranks_has_no_evidence() -> None:
    for technique in TECHNIQUES:
        program = Program.of(made(min(technique.workloads)))
        assert not any(entry.engaged for entry in technique.evidence(program, cast("Any", None), Mode.TRAIN, Cpu()))


def test_only_devices_with_collectives_run_them_and_only_built_in_models_are_divided() -> None:
    for technique in TECHNIQUES:
        assert technique.capability(Cpu()).ok is (technique.name != "context-parallel-alltoall")
        assert technique.capability(StubDevice("xla")).code is Code.NO_BACKEND
        assert not technique.accepts(workload("training", "linear"))


def test_the_cpu_has_no_causal_context_parallel() -> None:
    with pytest.raises(Unsupported, match=r"mixed torch\.Tensor and DTensor"):
        run(named(TECHNIQUES, "context-parallel-allgather"), made("attention-causal"), Mode.BACKWARD, Cpu())


def test_stages_begin_with_layers_that_have_parameters() -> None:
    assert cuts(made("train-mlp").module, 2) == ["fc3"]
    assert cuts(made("train-transformer").module, 4) == ["blocks.0", "blocks.1", "head"]
    assert [in_flight(order) for order in ("FFFFBBBB", "FFBFBFBB", "FBFB")] == [4, 2, 1]


def test_experts_drop_tokens_over_their_capacity_and_padding() -> None:
    problem = made("experts")
    module, (x, lengths) = problem.module, problem.inputs
    assert isinstance(module, Experts)
    taken = module.route(x, lengths) != 0
    assert taken.sum(1).max() == CAPACITY
    assert [bool(taken[group, int(length) :].any()) for group, length in enumerate(lengths)] == [False] * 4
    assert taken.sum() < 2 * lengths.sum()
    assert not module(x, lengths)[3, 7:].any()


def test_results_of_collectives_are_those_of_their_definition() -> None:
    x = torch.randn(3, 4, 37)
    total = x.sum(0)
    for call, wanted in (
        (Collective("all_reduce", "sum"), [[total]] * 3),
        (Collective("all_reduce", "avg"), [[x.mean(0)]] * 3),
        (Collective("all_reduce", "max", form="groups"),
         [[x[r].maximum(x[(r + 1) % 3]), x[r].maximum(x[r - 1])] for r in range(3)]),
        (Collective("all_gather"), [list(x)] * 3),
        (Collective("all_gather", form="uneven"), [[x[s].flatten()[: uneven(s, 0)] for s in range(3)]] * 3),
        (Collective("all_to_all", form="uneven"), [[x[s, r, : uneven(s, r)] for s in range(3)] for r in range(3)]),
        (Collective("broadcast", root=2), [[x[2]]] * 3),
        (Collective("scatter", root=1), [[x[1, r]] for r in range(3)]),
        (Collective("reduce", "sum", root=2), [[], [], [total]]),
        (Collective("reduce_scatter", "sum"), [[total[r]] for r in range(3)]),
        (Collective("reduce_scatter", "sum", form="uneven"), [[part] for part in total.flatten().tensor_split(3)]),
        (Collective("all_to_all"), [list(x[:, r]) for r in range(3)]),
        (Collective("send", form="transposed"), [[x[r - 1].t(), x[(r + 1) % 3].t()] for r in range(3)]),
        (Collective("gather", root=1), [[], list(x), []]),
    ):  # fmt: skip
        torch.testing.assert_close(call(x), wanted, rtol=1e-5, atol=1e-6)
    assert all(len({call.label for call in calls}) == len(calls) for calls in BUNDLES.values())


@pytest.mark.parametrize(("narrow", "holds"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_order_of_a_sum_bounds_its_error(narrow: torch.dtype, holds: bool) -> None:
    technique = named(TECHNIQUES, "collectives-3")
    assert isinstance(technique, collectives.Collectives)
    call = Collective("all_reduce", "sum")
    program = Program.of(made("all-reduce-3"))
    program.module = nn.Module()
    program.module.parts = ((call.label, call, (0,)),)  # type: ignore[assignment]  # all that is read
    total: Tensor = sum(reversed(program.inputs[0].to(narrow).unbind(0)), torch.zeros((), dtype=narrow)).float()
    result = {f"out[{call.label!r}][{rank}][0]": total for rank in range(3)}
    worst = technique.worst(program, [RankReport(1, "gloo", result, {}, [], ())])
    assert worst is not None
    assert (worst <= 1.0) is holds
