"""A technique must show that it ran in every run that is judged, not in the first alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, bench, case, passed, verdict_of
from torch import Tensor, nn

from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.compilation.compile import Compiled, reset_compiler
from accelcheck.techniques.observe import Log
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.probes import DRAWS


class ForAWhile(Planted):
    """Adds by ``addmm`` in its first calls, and by a product and a sum in later ones: the values are right in all."""

    name = "for-a-while"

    def __init__(self, calls: int) -> None:
        super().__init__(nothing)
        self.calls = calls

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        made = Counter[str]()
        module: Any = program.module

        def call(x: Tensor) -> Tensor:
            made["calls"] += 1
            if made["calls"] <= self.calls:
                return torch.addmm(module.bias, x, module.weight.t())
            out: Tensor = x @ module.weight.t() + module.bias
            return out

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen = log.count("aten::addmm")
        yield Evidence("aten::addmm dispatched >= 1", seen, engaged=seen >= 1)


def plain(name: str = "linear") -> Workload:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(nn.Linear(24, 16), (torch.randn(32, 24, generator=generator),))

    return Workload(name, "A linear layer.", make)


def absent(record: Record) -> list[str]:
    assert record.verdict is Verdict.FAIL, (record.verdict, record.why)
    return record.why.splitlines()


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize(("calls", "draw"), [(1, 1), (2, 1), (3, 3), (4, 3)])
def test_a_technique_that_engages_at_first_alone_fails_by_draw(calls: int, draw: int, mode: Mode, store: Store) -> None:
    # The second call is the rerun of the first; nobody watches draw 2.
    lines = absent(verdict_of(store, ForAWhile(calls), plain(), mode))
    assert lines == [f"not engaged: aten::addmm dispatched >= 1 [draw {draw}]: observed 0"]


def test_a_technique_that_engages_in_every_run_passes_with_the_evidence_of_the_first(store: Store) -> None:
    record = passed(store, ForAWhile(DRAWS + 1), plain())
    assert [entry.claim for entry in record.evidence] == [
        "aten::addmm dispatched >= 1",
        "no operator left cpu for the CPU",
    ]


class Growing(nn.Module):
    """A linear layer with a Python number that every call changes, so that it is compiled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return out * (1.0 if self.calls else 0.0)


@pytest.fixture
def limited() -> Iterator[None]:
    from torch._dynamo import config

    with contextlib.ExitStack() as held:
        held.enter_context(config.patch(recompile_limit=3))
        yield


@pytest.mark.usefixtures("limited")
def test_a_compiled_technique_that_runs_eagerly_after_the_recompile_limit_fails(store: Store) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Growing(), (torch.randn(32, 24, generator=generator),))

    technique = Compiled("compile-limited", "None.", level=1, arguments={"backend": "aot_eager"})
    lines = absent(verdict_of(store, technique, Workload("growing", "Guards.", make)))
    # Compiled in the warm-up, the first run and its rerun; then Dynamo gives up.
    assert lines[0] == "not engaged: compiled regions entered >= 1 [draw 1]: observed 0"
    assert {line.partition("[")[2].partition("]")[0] for line in lines} == {"draw 1"}


class Counting(Planted):
    """Counts its calls, and clears the count before each judged run; claims as many as one run makes."""

    name = "counting"

    def __init__(self) -> None:
        super().__init__(nothing, warmups=1)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        seen = program.extras["seen"] = Counter[str]()
        program.resets.append(seen.clear)

        def call(*inputs: Any) -> Any:
            seen["calls"] += 1
            return program.module(*inputs)

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        calls = program.extras["seen"]["calls"]
        yield Evidence("calls = 1", calls, engaged=calls == 1)


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_counts_begin_anew_before_every_judged_run(mode: Mode, store: Store) -> None:
    passed(store, Counting(), plain(), mode)


@pytest.mark.slow
def test_what_is_timed_must_be_engaged_too(store: Store) -> None:
    # Its judged run and the rerun are engaged, and the first call of what is timed.
    timed = Workload("timed", "A linear layer.", plain().make, 1, frozenset({Mode.SPEED}))
    technique = ForAWhile(3)
    record = bench(store, technique, timed).run(case(timed, Mode.SPEED, technique=technique.name))
    assert absent(record) == ["not engaged: aten::addmm dispatched >= 1 [after timing]: observed 0"]


class Compiling(Planted):
    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        sums = log.count("aten::add_?")
        yield Evidence("sums >= 1", sums, engaged=sums >= 1)

    def finish(self) -> None:
        reset_compiler()


@pytest.mark.slow
def test_a_compiled_technique_without_a_profiler_log_is_told_what_to_set(store: Store) -> None:
    def compiled(program: Program) -> None:
        program.call = torch.compile(program.module, backend="inductor")

    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(nn.GELU(), (torch.randn(4, 8, generator=generator),))

    record = verdict_of(store, Compiling(compiled, warmups=1), Workload("gelu-alone", "One operator.", make))
    assert record.verdict is Verdict.FAIL
    assert (
        "observed 0; an OperatorLog does not see the operators of compiled code: set `watch = ProfilerLog`"
        in record.why
    )
    plain = verdict_of(store, Compiling(nothing), Workload("gelu-alone", "One operator.", make))
    assert plain.verdict is Verdict.FAIL
    assert "ProfilerLog" not in plain.why
