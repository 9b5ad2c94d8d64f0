"""A run leaves nothing behind that eager does not: statistics, flags, hooks, generators, memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, faults, passed, seeded, verdict_of
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.checks import calls
from accelcheck.checks.calls import CALLS, cloned
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.selftest.faults import traces
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload


def after(act: Callable[[nn.Module], object]) -> Change:
    return traces.afterwards(act)(1.0)


def record_of(store: Store, change: Change, name: str = "mlp", mode: Mode = FORWARD, *, warmups: int = 0) -> Record:
    return verdict_of(store, Planted(change, warmups=warmups), seeded(name), mode)


@pytest.mark.parametrize(
    ("act", "path"),
    [
        (traces.freezes, "parameter:fc3.bias"),
        (traces.trains, "module:fc1"),
        (traces.hooks_module, "module:"),
        (traces.hooks_parameter, "parameter:fc1.weight"),
    ],
)
def test_flags_and_hooks_that_a_call_leaves_are_named_by_path(act: Any, path: str, store: Store) -> None:
    record = record_of(store, after(act))
    assert "mutated" in faults(record).get(path, ()), record.why


def test_a_parameter_that_a_warm_up_froze_is_named(store: Store) -> None:
    assert "parameter:fc3.bias" in faults(record_of(store, after(traces.freezes), warmups=1))


def test_a_parameter_that_the_technique_freezes_before_it_runs_is_its_own_matter(store: Store) -> None:
    record = record_of(store, lambda program: traces.freezes(program.module))
    assert record.verdict is Verdict.PASS, record.why


def test_statistics_that_evaluation_moves_are_named_and_those_that_training_moves_are_judged(store: Store) -> None:
    moved = faults(record_of(store, after(traces.moves_statistics), "batch-norm"))
    assert moved["buffer:running_mean"] == {"mutated"}
    for mode in (FORWARD, BACKWARD):
        assert record_of(store, nothing, "batch-norm", mode).verdict is Verdict.PASS


class Counting(nn.Module):
    """Counts its calls in a buffer, and draws a number that it does not use, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1  # type: ignore[assignment, operator]  # a tensor
        torch.rand(1)
        return self.linear(x).flatten()


def counting(generator: torch.Generator, _: int) -> Problem:
    return Problem(Counting(), (torch.randn(8, 16, generator=generator),))


COUNTING = Workload("counting", "Counts and draws.", counting)


def test_what_eager_does_too_is_no_fault(tmp_path: Path) -> None:
    passed(Store(tmp_path), Planted(nothing), COUNTING)


def test_a_generator_that_each_call_sets_to_one_state_is_named_though_eager_draws_from_it(tmp_path: Path) -> None:
    record = verdict_of(Store(tmp_path), Planted(after(traces.reseeds)), COUNTING)
    assert {fault.path for fault in record.faults} == {"generator of torch"}
    assert "set to the same state" in record.why


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (traces.reseeds, "generator of torch"),
        (traces.draws, "generator of torch"),
        (traces.draws_numpy, "generator of NumPy"),
        (traces.draws_python, "generator of Python"),
    ],
)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
def test_a_generator_that_eager_leaves_alone_is_named(mode: Mode, act: Any, name: str, store: Store) -> None:
    record = record_of(store, after(act), "train-mlp" if mode is TRAIN else "mlp", mode)
    assert set(faults(record)) == {name}


def dropping(generator: torch.Generator, _: int) -> Problem:
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))
    return Problem(module, (torch.randn(8, 16, generator=generator),))


def test_dropout_may_draw_where_its_rate_is_set_to_zero_for_the_check(tmp_path: Path) -> None:
    workload = Workload("dropping", "Dropout.", dropping)
    passed(Store(tmp_path), Planted(after(traces.draws)), workload, BACKWARD)
    evaluated = verdict_of(Store(tmp_path), Planted(after(traces.draws)), workload, FORWARD)
    assert {fault.path for fault in evaluated.faults} == {"generator of torch"}


@pytest.mark.parametrize("variant", traces.VARIANTS, ids=lambda variant: variant.name)
def test_what_is_put_back_or_bounded_or_copied_passes(variant: Any, store: Store) -> None:
    for cell in variant.cells:
        record = record_of(store, variant.plant(), cell.workload, cell.mode)
        assert record.verdict is Verdict.PASS, record.why


def test_a_result_that_is_wrong_after_many_calls_is_judged(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SECONDS", 60.0)
    record = record_of(store, traces.counting(0.01), "batch-norm")
    assert any("in call " in fault.place for fault in record.faults)


def test_a_call_that_waits_for_the_processor_ends_no_further_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SECONDS", 0.2)

    def change(program: Program) -> None:
        traces.counting(0.01)(program)
        call, numbers = program.call, itertools.count()

        def waiting(*inputs: Any) -> Any:
            if next(numbers) == traces.CLEAR // 2:
                time.sleep(5 * calls.SECONDS)
            return call(*inputs)  # type: ignore[misc]  # counting set it

        program.call = waiting

    record = record_of(store, change, "batch-norm")
    assert any("in call " in fault.place for fault in record.faults)


@pytest.mark.parametrize(("inputs_too", "what"), [(False, "results"), (True, "inputs")])
def test_memory_that_grows_with_every_call_is_a_fault(inputs_too: bool, what: str, store: Store) -> None:
    record = record_of(store, traces.keeping(10 * CALLS, inputs_too=inputs_too)(), "batch-norm")
    (fault,) = record.faults
    assert (fault.path, fault.view) == ("memory", "grows with calls")
    assert what in fault.expected


def test_an_output_in_anothers_memory_is_a_fault_where_eagers_has_its_own(store: Store) -> None:
    record = record_of(store, traces.in_the_input, "batch-norm")
    assert faults(record) == {"out": {"storage"}}
    assert record_of(store, nothing, "shared-views").verdict is Verdict.PASS


def test_a_result_that_refers_to_itself_is_given_back(store: Store) -> None:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x)
        out.itself = out  # type: ignore[attr-defined]  # a cycle, which only the collector frees
        return out

    assert record_of(store, calling(call), "batch-norm").verdict is Verdict.PASS


def test_a_clone_has_the_strides_of_its_original() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for value in (whole, whole.t(), whole[:, 1::2], whole[:1].expand(3, 6), functional.pad(whole, (0, 0))):
        clone = cloned(value)
        assert torch.equal(clone, value)
        assert (clone.stride(), clone.storage_offset()) == (value.stride(), value.storage_offset())
        assert clone.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert cloned("a mask") == "a mask"


class Itself(nn.Module):
    """Returns its first input, whose memory is that of its second one."""

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x, y + 1]


def test_a_technique_may_give_each_input_memory_of_its_own(store: Store) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        base = torch.randn(8, generator=generator)
        return Problem(Itself(), (base[:4], base[4:]))

    def apart(program: Any) -> None:
        program.inputs = tuple(value.clone() for value in program.inputs)

    workload = Workload("itself", "An input as it is.", make)
    passed(store, Planted(apart), workload, FORWARD)
