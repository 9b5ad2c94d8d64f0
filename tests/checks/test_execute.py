"""The engine's way of one case: evidence, errors, warm-ups, poison, mutations, the ledger."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import (
    BACKWARD,
    FORWARD,
    TRAIN,
    Bed,
    Planted,
    bench,
    case,
    erred,
    failed,
    faults,
    passed,
    seeded,
    verdict_of,
)
from torch import Tensor

from accelcheck.checks import execute, numerics
from accelcheck.checks.trial import Finding
from accelcheck.core.capability import Code, unavailable, unsupported
from accelcheck.core.case import FELL_BACK, Evidence, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.devices.base import Device, Status
from accelcheck.expectations.ledger import Entry, Ledger, hold
from accelcheck.report.message import explain
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import calling, nothing, replacing, scaled
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.observe import Log
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.probes import DRAWS, draws
from accelcheck.workloads.problem import OtherSizes

SEEDS = (0, 1, 2)


def cached(program: Program) -> None:
    """The first result again, whatever the input."""
    kept: list[Any] = []
    module = program.module

    def call(*inputs: Any) -> Any:
        if not kept:
            kept.append(module(*inputs))
        return kept[0]

    program.call = call


class Silent(Planted):
    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        return ()


class Blind(Planted):
    """Could not see what it claims; `beside` says whether it saw something else."""

    beside = False

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        if self.beside:
            yield from super().evidence(program, log, mode, device)
        yield Evidence.unseen("bytes in a file fall", "torch.save: RuntimeError: no such copy")


class Beside(Blind):
    beside = True


class Idle(Planted):
    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield Evidence("graphs compiled >= 1", 0, engaged=False)


class Finishing(Planted):
    """Knows how often it was told that a case is over."""

    finished = 0

    def finish(self) -> None:
        self.finished += 1


def breaks(program: Program) -> None:
    raise RuntimeError("out of registers")


def refuses(program: Program) -> None:
    raise Unsupported(unsupported(Code.NO_FEATURE, "no such kernel"))


@pytest.mark.slow
def test_the_plain_program_passes_in_every_mode(store: Store) -> None:
    for name, mode in (("mlp", FORWARD), ("cnn", BACKWARD), ("train-mlp", TRAIN)):
        record = passed(store, Planted(nothing, keeps_strides=True), seeded(name), mode)
        assert record.compared > 0
        assert record.why == ""
        assert {"oracle", "prepare", "run", "judge"} <= record.seconds.keys()


@pytest.mark.parametrize("technique", [Silent, Blind])
def test_no_evidence_or_none_that_could_be_had_is_an_error(technique: type[Planted], store: Store) -> None:
    record = erred(store, technique(nothing), seeded("mlp"))
    assert "planted gave no evidence that it ran" in record.why


def test_values_are_judged_beside_evidence_that_could_not_be_had_and_the_case_says_so(store: Store) -> None:
    record = passed(store, Beside(nothing), seeded("mlp"))
    assert record.compared > 0
    assert record.remark == "could not be seen: bytes in a file fall: torch.save: RuntimeError: no such copy"
    assert "    ?   could not be seen: bytes in a file fall: torch.save" in explain(record)
    failed(store, Beside(replacing(out=scaled(2.0))), seeded("mlp"))


def test_a_technique_that_did_not_engage_fails_though_its_values_are_right(store: Store) -> None:
    record = failed(store, Idle(nothing), seeded("mlp"))
    assert record.why == "not engaged: graphs compiled >= 1: observed 0"


def test_what_a_technique_raises_is_its_error_with_a_traceback(store: Store) -> None:
    record = erred(store, Planted(breaks), seeded("mlp"))
    assert record.why == "RuntimeError: out of registers"
    assert "in breaks" in record.traceback


def test_what_only_the_run_could_tell_is_unsupported(store: Store) -> None:
    record = verdict_of(store, Planted(refuses), seeded("mlp"))
    assert (record.verdict, record.code) == (Verdict.UNSUPPORTED, "no-feature")


@pytest.mark.parametrize("change", [nothing, breaks, refuses])
def test_a_technique_is_told_that_a_case_is_over_whatever_became_of_it(change: Change, store: Store) -> None:
    technique = Finishing(change)
    verdict_of(store, technique, seeded("mlp"))
    assert technique.finished == 1


def made(function: Callable[[Tensor], Any], *shape: int, fill: float | None = None) -> Workload:
    """A workload of a function of one tensor, of which the first element may be given."""

    class Made(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    def make(generator: torch.Generator, extent: int) -> Problem:
        x = torch.randn(shape, generator=generator)
        if fill is not None:
            x.view(-1)[0] = fill
        return Problem(Made(), (x,))

    return Workload("made", "Made.", make)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (made(lambda x: x * 2, 0, 8), "no elements to compare"),
        (made(lambda x: x * float("nan"), 8, 8), "the FP64 oracle is NaN"),
    ],
    ids=["nothing to compare", "an oracle that fails"],
)
def test_what_cannot_be_judged_is_an_error_and_never_a_pass(workload: Workload, message: str, tmp_path: Path) -> None:
    record = erred(Store(tmp_path), Planted(nothing), workload)
    assert message in record.why


def test_nothing_compared_is_an_error_even_if_the_oracle_let_it_through() -> None:
    evidence = (Evidence("one", 1, engaged=True), Evidence("two", 1, engaged=True))
    record = execute._record(case(seeded("mlp")), Finding(evidence, (), (), 0))
    assert record.verdict is Verdict.ERROR
    assert (record.code, record.faults) == (ErrorCode.NOTHING_COMPARED, ())


def test_a_record_of_very_many_faults_says_how_many_it_leaves_out() -> None:
    evidence = (Evidence("one", 1, engaged=True), Evidence("two", 1, engaged=True))
    faults = [Fault(FaultKind.VIEW, f"grad:{number}", "row", measured=2, allowed=1) for number in range(2500)]
    record = execute._record(case(seeded("mlp")), Finding(evidence, faults, (), 1))
    assert record.verdict is Verdict.FAIL
    assert record.faults[:1000] == tuple(faults[:1000])
    assert [str(fault) for fault in record.faults[1000:]] == ["1500 more faults"]


@pytest.mark.parametrize("swallow", [torch.nan_to_num, lambda x: x.clamp(-1e30, 1e30)])
def test_an_infinity_that_is_swallowed_is_caught(swallow: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    workload = made(lambda x: x * 2, 8, 8, fill=math.inf)
    assert verdict_of(Store(tmp_path), Planted(nothing), workload).verdict is Verdict.PASS
    record = verdict_of(Store(tmp_path), Planted(replacing(out=swallow)), workload)
    assert faults(record) == {"out": {"+Inf pattern"}}


def test_a_nan_among_the_inputs_is_no_mutation(tmp_path: Path) -> None:
    workload = made(lambda x: torch.nan_to_num(x) * 2, 8, 8, fill=math.nan)
    passed(Store(tmp_path), Planted(nothing), workload)
    record = verdict_of(Store(tmp_path), Planted(calling(lambda module, x: module(x.nan_to_num_()))), workload)
    assert faults(record).keys() == {"input[0]"}


def test_a_negative_zero_for_zero_is_a_mutation(tmp_path: Path) -> None:
    workload = made(lambda x: x * 2, 8, 8, fill=0.0)
    record = verdict_of(Store(tmp_path), Planted(calling(lambda module, x: module(x.detach().neg_()))), workload)
    assert faults(record)["input[0]"]


class FewSamples(Store):
    """Budgets of few samples, a thousand times too tight; careful ones are right."""

    careful = 0

    def get(self, *args: Any, careful: int = 0, algorithm: str = "", **more: Any) -> Any:
        self.careful += 0 if algorithm else careful
        reference = super().get(*args, careful=careful, algorithm=algorithm, **more)
        tight = {path: {v: b / 1000 for v, b in views.items()} for path, views in reference.budgets.items()}
        return reference if careful == 2 else replace(reference, budgets=tight)


@pytest.mark.slow
def test_more_samples_are_asked_before_a_close_result_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = seeded("mlp")
    monkeypatch.setattr("accelcheck.verify.judge.CLOSE", (math.inf, math.inf))
    store = FewSamples(tmp_path)
    assert verdict_of(store, Planted(nothing), workload, BACKWARD).verdict is Verdict.PASS
    assert store.careful >= 3 * DRAWS
    monkeypatch.setattr("accelcheck.verify.judge.CLOSE", (1.0, 1.0))
    store = FewSamples(tmp_path)
    assert verdict_of(store, Planted(nothing), workload, BACKWARD).verdict is Verdict.FAIL
    assert store.careful == 0


def test_memory_is_poisoned_before_each_draw_and_not_the_rerun(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    plain = torch.full

    def full(size: Any, value: Any, **more: Any) -> Tensor:
        happened.append((tuple(size), str(value), more["dtype"]))
        return plain(size, value, **more)

    def call(module: Any, *inputs: Any) -> Any:
        happened.append("call")
        return module(*inputs)

    workload = seeded("mlp")
    expected = store.get(case(workload, BACKWARD), Planted(nothing), workload).layouts.values()
    monkeypatch.setattr(torch, "full", full)
    passed(store, Planted(calling(call), warmups=1), workload, BACKWARD)
    poison = [(layout.shape, "nan", torch.float32) for layout in expected]
    # The warm-up, the case's own draw, its rerun, and the draws after it.
    assert happened == ["call", *poison, "call", "call", *[*poison, "call"] * (DRAWS - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS)
def test_memory_that_was_never_written_is_not_the_right_result_of_eager(number: int, store: Store) -> None:
    # The reference was computed in this process: without poison, its freed memory may hold the right answer.
    unwritten = calling(lambda module, x: torch.empty(*x.shape[:-1], module.bias.numel(), dtype=x.dtype))
    assert verdict_of(store, Planted(unwritten), seeded("matmul", number)).verdict is Verdict.FAIL


@pytest.mark.slow
def test_a_result_that_an_earlier_run_left_is_caught_by_the_warm_up_alone(store: Store) -> None:
    assert verdict_of(store, Planted(cached, warmups=1), seeded("mlp")).verdict is Verdict.FAIL
    assert verdict_of(store, Planted(nothing, warmups=2), seeded("mlp")).verdict is Verdict.PASS


@pytest.mark.parametrize(("name", "mode"), [("cnn", BACKWARD), ("train-mlp", TRAIN)])
def test_warm_ups_leave_no_trace_in_parameters_and_buffers(name: str, mode: Mode, store: Store) -> None:
    passed(store, Planted(nothing, warmups=2), seeded(name), mode)


def test_work_that_left_the_device_fails(store: Store) -> None:
    class Straying(Bed):
        def fallbacks(self) -> Mapping[str, int]:
            return {"aten::topk": 3}

    workload = seeded("mlp")
    record = bench(store, Planted(nothing), workload, Straying()).run(case(workload))
    assert record.verdict is Verdict.FAIL
    assert "no operator left cpu for the CPU: observed aten::topk x3" in record.why
    owned = replace(workload, sizes=OtherSizes({}))
    record = bench(store, Planted(nothing), owned, Straying()).run(case(owned))
    assert record.verdict is Verdict.PASS, record.why
    assert {e.observed for e in record.evidence if e.claim == FELL_BACK} == {"aten::topk x3"}


def test_a_device_without_true_float32_is_judged_by_its_results(store: Store) -> None:
    class Coarse(Bed):
        def float32_error(self) -> float:
            return 2.0**-11

    workload = seeded("mlp")
    record = bench(store, Planted(nothing), workload, Coarse()).run(case(workload))
    assert record.verdict is Verdict.PASS, record.why


def test_a_dtype_that_the_device_does_not_declare_is_unsupported(store: Store) -> None:
    class Narrow(Bed):
        dtypes = frozenset({"float32"})

    workload = seeded("mlp")
    record = bench(store, Planted(nothing), workload, Narrow()).run(case(workload, dtype="bfloat16"))
    assert (record.verdict, record.code) == (Verdict.UNSUPPORTED, "no-dtype")


def test_a_device_that_is_absent_is_unavailable(store: Store) -> None:
    workload = seeded("mlp")
    absent = bench(store, Planted(nothing), workload)
    absent.statuses = {"cpu": Status("cpu", unavailable(Code.NO_HARDWARE, "no such chip"))}
    record = absent.run(case(workload))
    assert (record.verdict, record.code) == (Verdict.UNAVAILABLE, "no-hardware")


def held(store: Store, change: Change, *entries: Entry) -> Record:
    """The record of a change to `mlp`, held against a ledger."""
    workload = seeded("mlp")
    expecting = bench(store, Planted(change), workload)
    return hold(expecting.run(case(workload)), Ledger(entries))


def entry(match: str, at_most: float | str = 1e9, verdict: Verdict = Verdict.FAIL) -> Entry:
    return Entry(("planted/mlp/*",), verdict, at_most, "known", "link", "owner", dt.date(9999, 1, 1), match=match)


def test_a_case_without_a_ratio_says_why(store: Store) -> None:
    def fails(program: Program) -> None:
        raise LookupError("no such kernel")

    def refuses(program: Program) -> None:
        raise Unsupported(unsupported(Code.NO_FEATURE, "not on this chip"))

    workload = seeded("mlp")
    for change, reason in ((fails, "LookupError: no such kernel"), (refuses, "not on this chip")):
        record = bench(store, Planted(change), workload).ratio(case(workload, Mode.SPEED))
        assert isinstance(record, str)
        assert reason in record
    absent = bench(store, Planted(nothing), workload)
    absent.statuses = {"cpu": Status("cpu", unavailable(Code.NO_HARDWARE, "gone"))}
    assert absent.ratio(case(workload, Mode.SPEED)) == str(unavailable(Code.NO_HARDWARE, "gone"))


def test_a_device_is_opened_once_for_all_cases_of_a_process(store: Store) -> None:
    class Counting(Bed):
        opened = 0

        def open(self) -> None:
            self.opened += 1

    workload, place = seeded("mlp"), Counting()
    shared = bench(store, Planted(nothing), workload, place)
    for mode in (FORWARD, BACKWARD):
        assert shared.run(case(workload, mode)).verdict is Verdict.PASS
    assert place.opened == 1


GAIN = replacing(out=scaled(1.01))


def test_a_failure_whose_every_line_is_expected_is_an_xfail(store: Store) -> None:
    record = held(store, GAIN, entry("out: view"))
    assert record.verdict is Verdict.XFAIL
    assert record.why.startswith("known (link)\nout: view")


def test_a_new_line_beside_a_known_failure_is_a_failure(store: Store) -> None:
    assert held(store, GAIN, entry("out: view gain")).verdict is Verdict.FAIL


def test_a_known_failure_that_passes_must_be_removed(store: Store) -> None:
    record = held(store, nothing, entry("out: view"))
    assert record.verdict is Verdict.XPASS
    assert not record.verdict.green
    assert "remove the entry from the ledger" in record.why


def test_a_known_error_is_an_xfail_and_no_other_error_is(store: Store) -> None:
    assert held(store, breaks, entry("out of registers", "RuntimeError", Verdict.ERROR)).verdict is Verdict.XFAIL
    assert held(store, breaks, entry("out of memory", "RuntimeError", Verdict.ERROR)).verdict is Verdict.ERROR


def test_an_error_of_another_class_than_the_ledger_says_is_an_error(store: Store) -> None:
    record = held(store, breaks, entry("out of registers", "LookupError", Verdict.ERROR))
    assert record.verdict is Verdict.ERROR
    assert "ledger: expected LookupError, got RuntimeError (known)" in record.why


def test_a_fault_beyond_its_size_in_the_ledger_is_a_failure_that_says_so(store: Store) -> None:
    record = held(store, GAIN, entry("out: view", 2.0))
    assert record.verdict is Verdict.FAIL
    lines = [line for line in record.why.splitlines() if line.startswith("ledger: ")]
    assert lines[0].startswith("ledger: expected at most 2 times the budget, got ")
    assert "(known): out: view " in lines[0]


def on_call(number: int, change: Callable[[Tensor], Tensor]) -> Change:
    """Makes each output 1 % too large, and changes that of one call more."""
    calls = itertools.count(1)

    def call(module: Any, x: Tensor) -> Any:
        out = module(x) * 1.01
        return change(out) if next(calls) == number else out

    return calling(call)


def test_faults_that_the_ledger_expects_do_not_end_the_judgement(store: Store) -> None:
    """The last of all calls gives 100 times too much, behind many faults that are known."""
    total = len([*draws(seeded("mlp"), FORWARD, lambda _: True)]) + 1  # the first is run again
    late = on_call(total, lambda out: out * 100)
    known = held(store, on_call(0, lambda out: out), entry("^out: view ", 1e6))
    assert known.verdict is Verdict.XFAIL
    assert len(known.faults) > 10
    widest = max(fault.size or 0.0 for fault in known.faults)
    record = held(store, late, entry("^out: view ", 4 * widest))
    assert record.verdict is Verdict.FAIL
    assert f"ledger: expected at most {4 * widest:g} times the budget, got " in record.why


def test_a_draw_that_raises_as_expected_does_not_hide_a_fault_of_another(store: Store) -> None:
    calls = itertools.count(1)

    def call(module: Any, x: Tensor) -> Any:
        number = next(calls)
        if number == 1:
            raise LookupError("no kernel\nfor this")
        return module(x) * (1.5 if number == 3 else 1.0)

    error = entry("^LookupError: no kernel$", "LookupError", Verdict.ERROR)
    record = held(store, calling(call), error)
    assert record.verdict is Verdict.FAIL, record.why
    assert "run: raised: expected a result, got LookupError: no kernel" in record.why
    assert "out: view row" in record.why
    calls = itertools.count(1)
    assert held(store, calling(call), error, entry("^out: view ")).verdict is Verdict.XFAIL


def test_of_two_errors_both_are_said_and_one_that_is_not_expected_fails(store: Store) -> None:
    calls = itertools.count(1)

    def call(module: Any, x: Tensor) -> Any:
        raise LookupError("known") if next(calls) == 1 else OverflowError("new")

    record = held(store, calling(call), entry("known", "LookupError", Verdict.ERROR))
    assert record.verdict is Verdict.FAIL
    assert [(fault.view, fault.got) for fault in record.faults] == [("LookupError", "known")] + [
        ("OverflowError", "new")
    ] * (len(record.faults) - 1)


def test_an_error_of_every_draw_is_the_error_of_the_case_after_few_of_them(store: Store) -> None:
    calls = itertools.count(1)

    def call(module: Any, x: Tensor) -> Any:
        if next(calls):
            raise LookupError("no kernel")

    record = verdict_of(store, Planted(calling(call)), seeded("mlp"))
    assert (record.verdict, record.reason, record.faults) == (Verdict.ERROR, "LookupError: no kernel", ())
    assert next(calls) == 1 + numerics.MOST_RAISED


def test_an_error_that_a_new_preparation_repeats_is_the_error_of_the_first_draw(store: Store) -> None:
    calls = itertools.count(1)

    def change(program: Program) -> None:
        if next(calls) > 1:
            raise RuntimeError("still broken")

        def fail(module: Any, x: Tensor) -> Any:
            raise LookupError("no kernel")

        calling(fail)(program)

    record = erred(store, Planted(change), seeded("mlp"))
    assert record.reason == "LookupError: no kernel"


def test_a_colon_in_the_name_of_an_output_stays_in_the_path_of_its_fault(store: Store) -> None:
    """The second draw is wrong in an output whose name looks like the text of a fault."""

    class Named(torch.nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a: b": x * 2}

    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Named(), (torch.randn(4, 8, generator=generator),))

    calls = itertools.count(1)

    def call(module: Any, x: Tensor) -> Any:
        wrong = next(calls) == 3  # the first is run again
        return {"a: b": x * (3 if wrong else 2)}

    record = failed(store, Planted(calling(call)), Workload("named", "Named.", make))
    read = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert read.faults == record.faults
    assert {(fault.path, fault.draw) for fault in read.faults} == {("out['a: b']", "draw 1")}


def test_a_record_survives_the_journal(store: Store) -> None:
    record = verdict_of(store, Planted(GAIN), seeded("mlp"))
    back = Record.from_json(json.loads(json.dumps(record.as_json(), allow_nan=False)))
    assert replace(back, seconds={}) == replace(record, seconds={})


def test_a_long_error_is_cut_and_an_expected_one_keeps_no_traceback(store: Store) -> None:
    def complain(program: Program) -> None:
        try:
            float("cause")
        except ValueError as error:
            raise ValueError("\n".join(["first", *(str(number) for number in range(1000))])) from error

    workload = seeded("mlp")
    place = bench(store, Planted(complain), workload)
    record = place.run(case(workload))
    assert record.verdict is Verdict.ERROR
    assert record.why.splitlines()[0] == "ValueError: first"
    assert record.why.splitlines()[-1] == f"({1001 - execute.LINES} more lines)"
    assert "complain" in record.traceback
    assert record.traceback.index("could not convert string to float: 'cause'") < record.traceback.index(
        "ValueError: first"
    )
    assert len(record.traceback.splitlines()) < 100
    expected = Entry(("*",), Verdict.ERROR, "ValueError", "known", "link", "owner", dt.date(2999, 1, 1), match="first")
    known = hold(record, Ledger((expected,)))
    assert (known.verdict, known.traceback) == (Verdict.XFAIL, "")
