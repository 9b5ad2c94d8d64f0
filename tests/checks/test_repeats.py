"""Verdicts cover unwatched runs, second calls, and results that their owner keeps; never nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Bed, Planted, bench, case, faults, passed, seeded, verdict_of
from torch import Tensor, nn

from accelcheck.checks import execute, numerics
from accelcheck.checks.repeats import halved, held
from accelcheck.checks.trial import Finding
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import both, nothing
from accelcheck.selftest.faults.repeats import (
    copied_out,
    in_one_buffer,
    in_turn,
    overwritten,
    watched_only,
    wrong_again,
)
from accelcheck.verify.judge import judge
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.probes import Draw


class Copying(Planted):
    """Is prepared anew for other parameters."""

    bakes = True


class Promising(Bed):
    """The CPU as a device that promises nothing."""

    features = frozenset({"strided"})


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("planted", [Planted, Copying])
@pytest.mark.parametrize(("name", "mode"), [("mlp", FORWARD), ("mlp", BACKWARD), ("train-mlp", TRAIN)])
def test_what_is_right_only_when_watched_fails(planted: type[Planted], name: str, mode: Mode, fresh: Store) -> None:
    assert verdict_of(fresh, planted(nothing), seeded(name), mode).verdict is Verdict.PASS
    assert verdict_of(fresh, planted(watched_only), seeded(name), mode).verdict is Verdict.FAIL


@pytest.mark.parametrize(("name", "mode"), [("mlp", FORWARD), ("train-mlp", TRAIN)])
def test_what_is_judged_by_one_draw_runs_unwatched_too(name: str, mode: Mode, fresh: Store) -> None:
    def wrong(change: Change) -> set[str]:
        workload = seeded(name)
        made = bench(fresh, Planted(change), workload).trial(case(workload, mode))
        return {fault.draw for fault in numerics.verify(made, (FIRST,)).wrong}

    assert wrong(nothing) == set()
    assert wrong(watched_only) == {numerics.AGAIN}


def test_evidence_is_asked_of_all_draws_but_the_unobserved_one(fresh: Store) -> None:
    class Asked(Planted):
        def __init__(self) -> None:
            super().__init__(nothing)
            self.times = 0

        def evidence(self, *_: Any) -> tuple[Evidence]:
            self.times += 1
            return (Evidence("it ran", 1, engaged=True),)

    technique, workload = Asked(), seeded("mlp")
    numerics.verify(
        bench(fresh, technique, workload).trial(case(workload)), [FIRST, Draw(1), Draw(2), Draw(0, "zeros")]
    )
    assert technique.times == 3


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_a_wrong_second_call_fails_where_the_device_promises_nothing(mode: Mode, fresh: Store) -> None:
    workload = seeded("mlp")

    def record(change: Change) -> Record:
        return bench(fresh, Planted(change), workload, Promising()).run(case(workload, mode))

    assert record(nothing).verdict is Verdict.PASS
    failed = record(wrong_again(0.5))
    assert failed.verdict is Verdict.FAIL
    assert numerics.AGAIN in {fault.draw for fault in failed.faults}


def documented(program: Program) -> None:
    program.overwrites = "documented"


def test_an_output_that_the_next_call_overwrites_fails_unless_the_technique_declares_it(fresh: Store) -> None:
    workload = seeded("mlp")
    for planted in (Planted, Copying):
        assert faults(verdict_of(fresh, planted(in_turn(1)), workload)) == {"out": {"mutated"}}
        assert verdict_of(fresh, planted(copied_out()), workload).verdict is Verdict.PASS
    record = passed(fresh, Planted(both(in_turn(1), documented)), workload)
    assert "documented" in {evidence.observed for evidence in record.evidence}


def test_gradients_that_the_next_pass_overwrites_fail(fresh: Store) -> None:
    record = faults(verdict_of(fresh, Planted(in_one_buffer()), seeded("mlp"), BACKWARD))
    assert set().union(*record.values()) == {"mutated"}
    assert all(path.startswith("grad:") for path in record)


def test_views_of_inputs_and_parameters_change_with_these() -> None:
    program = Program.of(Problem(nn.Linear(3, 3), (torch.ones(3, 3),)))
    x, weight = program.inputs[0], program.module.get_parameter("weight").detach()
    results = {"view": x[1:], "weight": weight.t(), "own": torch.ones(2), "row": torch.ones(2, 3)[0]}
    changed = held(program, results)
    assert changed() == []
    for tensor in (x, weight, *results.values()):
        tensor.add_(1)
    assert [fault.path for fault in changed()] == ["own", "row"]


@pytest.mark.parametrize("features", [frozenset({"strided"}), frozenset({"strided", "deterministic"})])
def test_gradients_that_are_set_where_they_add_up_fail(features: frozenset[str], fresh: Store) -> None:
    class Place(Bed):
        pass

    Place.features = features
    workload = seeded("mlp")
    assert bench(fresh, Planted(nothing), workload, Place()).run(case(workload, BACKWARD)).verdict is Verdict.PASS
    record = bench(fresh, Planted(overwritten), workload, Place()).run(case(workload, BACKWARD))
    assert {fault.draw for fault in record.faults} == {numerics.AGAIN}
    assert {fault.path.partition(":")[0] for fault in record.faults} == {"grad"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_of_two_equal_gradients_is_one_of_them_bit_for_bit(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    ones = torch.tensor(
        [info.max, -info.max, info.tiny * info.eps, -info.tiny, 0.0, -0.0, float("inf"), 1.25], dtype=dtype
    )
    once = {"grad:x": ones, "out": ones}
    again = halved({"grad:x": ones + ones, "out": ones}, once)
    assert {path: tensor.tolist() for path, tensor in again.items()} == {path: ones.tolist() for path in once}
    assert halved({"grad:x": ones}, once)["grad:x"][-1] == 0.625


def test_a_program_adds_to_its_gradients_only_where_it_is_told() -> None:
    program = Program.of(Problem(nn.Linear(3, 2), (torch.ones(4, 3),)))
    first = {path: tensor.clone() for path, tensor in program.run(BACKWARD).items()}
    assert all(torch.equal(tensor, first[path]) for path, tensor in program.run(BACKWARD).items())
    program.accumulates = True
    again = program.run(BACKWARD)
    assert all(torch.equal(again[path], first[path] * (1 + path.startswith("grad:"))) for path in first)


class Cut(nn.Module):
    """Nothing can be differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2


class Chosen(nn.Module):
    """Numbers, and the index of the largest."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = x * 2
        return out, out.argmax(-1)


def of(module: type[nn.Module], **more: Any) -> Workload:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(module(), (torch.randn(4, 8, generator=generator),))

    return Workload("made", "Made.", make, **more)


def test_a_backward_case_without_a_gradient_is_an_error(fresh: Store) -> None:
    workload = of(Cut, given=True, modes=frozenset({FORWARD, BACKWARD}))
    assert verdict_of(fresh, Planted(nothing), workload, FORWARD).verdict is Verdict.PASS
    record = verdict_of(fresh, Planted(nothing), workload, BACKWARD)
    assert (record.verdict, record.code) == (Verdict.ERROR, ErrorCode.NOTHING_COMPARED)
    assert record.reason.startswith("no gradient was compared")
    assert record.compared > 0


def test_integers_do_not_stand_for_numbers_that_are_not_judged(fresh: Store) -> None:
    workload = of(Chosen)
    made = bench(fresh, Planted(nothing), workload).trial(case(workload))
    reference = made.reference()
    result = made.program(made.case.seed).run(FORWARD)
    assert judge(result, reference).compared == {"out": 32, "exact": 4}
    assert judge(result, replace(reference, unjudged={"out[0]": "for a test"})).compared == {"exact": 4}
    alone = replace(reference, truth={"out": reference.truth["out[1]"]})
    assert judge({"out": result["out[1]"]}, alone).compared == {"out": 4}


def test_a_finding_that_lacks_what_it_is_about_is_no_pass() -> None:
    evidence = (Evidence("one", 1, engaged=True), Evidence("two", 1, engaged=True))
    record = execute._record(case(seeded("mlp")), Finding(evidence, (), (), 5, lacking="parameter"))
    assert (record.verdict, record.code) == (Verdict.ERROR, ErrorCode.NOTHING_COMPARED)
    assert "parameter" in record.reason
