"""Nothing that a technique or workload does touches its judge, nor the cases after it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_harness import (
    BACKWARD,
    FORWARD,
    Bed,
    Planted,
    bench,
    case,
    erred,
    failed,
    observed,
    passed,
    seeded,
    verdict_of,
)
from torch import nn
from torch.nn import functional

from accelcheck.checks.remarks import SWITCHED_OFF
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.leaks import LEAKS
from accelcheck.verify import known_answers
from accelcheck.verify.cache import clean_process
from accelcheck.verify.generators import Generators
from accelcheck.verify.global_state import GlobalState
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload


def off_by_one_percent(x: Any, weight: Any, bias: Any = None) -> Any:
    return 1.01 * torch.addmm(bias, x, weight.t())


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    state = GlobalState.now()
    yield
    state.restore()


class Leaking(Planted):
    """Leaves something changed; the program itself stays eager."""

    def __init__(self, leak: Callable[[], object]) -> None:
        super().__init__(lambda _: None)
        self.leak = leak

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        self.leak()


class Patching(Planted):
    """Replaces `linear` by a kernel that is 1 % wrong, and undoes it at the end, as a technique must."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        self.plain = functional.linear
        functional.linear = off_by_one_percent  # type: ignore[assignment]  # that is the plant

    def finish(self) -> None:
        functional.linear = self.plain


class Blind(Planted):
    """Computes no gradients, and enables them again at the end."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        torch.set_grad_enabled(False)

    def finish(self) -> None:
        torch.set_grad_enabled(True)


PLAIN = Planted(lambda _: None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """References that a clean process computes, as in a run."""
    clean = clean_process([seeded("mlp"), seeded("mlp").make, DROPPING, DROPPING.make, RANDOM, RANDOM.make])
    yield Store(tmp_path, clean)
    clean.close()


def told(record: Record) -> Any:
    """Returns results that must not depend on the cases before."""
    return record.verdict, record.why, record.figures, record.compared, record.evidence, record.eager_excess


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", LEAKS)
def test_what_a_case_leaves_changed_is_named_and_put_back(name: str, store: Store) -> None:
    before = GlobalState.now()
    record = failed(store, Leaking(LEAKS[name]), seeded("mlp"))
    assert f"{name.partition(' of a ')[0].partition(' that ')[0]}: left changed: expected " in record.why
    assert before.restore() == []


def test_what_is_compiled_after_a_dispatch_mode_was_left_active_is_compiled(store: Store) -> None:
    record = verdict_of(store, Leaking(LEAKS["dispatch modes"]), seeded("mlp"))
    assert record.why.count("left changed") == 1
    assert not torch_names.python_dispatch.is_in_torch_dispatch_mode()  # dynamo would skip everything in silence


@pytest.mark.slow(after=4)
@pytest.mark.parametrize("name", LEAKS)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
def test_a_leak_changes_no_figure_of_the_cases_around_it(name: str, mode: Mode, store: Store, tmp_path: Path) -> None:
    workload = seeded("mlp")
    alone = told(verdict_of(store, PLAIN, workload, mode=mode))
    leak = Leaking(LEAKS[name])
    (tmp_path / "other").mkdir()
    fresh = Store(tmp_path / "other", store.cache.clean)
    first = told(verdict_of(fresh, leak, workload, mode=mode))
    assert told(verdict_of(fresh, PLAIN, workload, mode=mode)) == alone
    assert told(verdict_of(store, leak, workload, mode=mode)) == first


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("technique", [Patching, Blind])
def test_a_wrong_kernel_that_is_undone_fails_alone_and_after_eager(
    technique: type[Patching | Blind], store: Store, tmp_path: Path
) -> None:
    workload = seeded("mlp")
    alone = told(verdict_of(store, technique(), workload, mode=BACKWARD))
    assert alone[0] is Verdict.FAIL
    (tmp_path / "other").mkdir()
    fresh = Store(tmp_path / "other", store.cache.clean)
    assert verdict_of(fresh, PLAIN, workload, mode=BACKWARD).verdict is Verdict.PASS
    assert told(verdict_of(fresh, technique(), workload, mode=BACKWARD)) == alone


def test_gradients_that_are_not_computed_are_missing(store: Store) -> None:
    record = verdict_of(store, Blind(), seeded("mlp"), mode=BACKWARD)
    assert "grad:input[0]: missing: expected a tensor, got nothing" in record.why


class Dropping(nn.Module):
    """A product, dropout, and its output times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x))


class RandomFunction(nn.Module):
    """The same through a function, whose rate nobody can find."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.noisy = Noisy()

    def forward(self, x: Any) -> Any:
        return self.noisy(self.linear(x))


class Noisy(nn.Module):
    def forward(self, x: Any) -> Any:
        return functional.dropout(x, 0.1, self.training)


def drawn(kind: type[nn.Module]) -> Callable[[torch.Generator, int], Problem]:
    return lambda generator, _: Problem(kind(), (torch.randn(16, 32, generator=generator),))


DROPPING = Workload("dropping", "Dropout in training.", drawn(Dropping))
RANDOM = Workload("random-function", "Dropout as a function.", drawn(RandomFunction))


def times(factor: float) -> Planted:
    def change(program: Program) -> None:
        module = program.module
        program.call = lambda *inputs: factor * module(*inputs)

    return Planted(change)


def test_random_modules_drop_nothing_and_that_is_said(store: Store) -> None:
    record = passed(store, PLAIN, DROPPING, mode=BACKWARD)
    assert observed(record, SWITCHED_OFF) == "drop: Dropout(p=0.1, inplace=False)"
    forward = verdict_of(store, PLAIN, DROPPING, mode=FORWARD)
    assert SWITCHED_OFF not in {evidence.claim for evidence in forward.evidence}


def test_dropout_hides_no_error(store: Store) -> None:
    assert verdict_of(store, times(1.3), DROPPING, mode=BACKWARD).verdict is Verdict.FAIL
    assert verdict_of(store, times(1.001), DROPPING, mode=BACKWARD).verdict is Verdict.FAIL


def test_a_random_function_is_an_error_that_names_its_module(store: Store) -> None:
    record = erred(store, PLAIN, RANDOM, mode=BACKWARD)
    assert "two runs from the same state differ in out: the output of the module 'noisy' is random" in record.why
    assert verdict_of(store, PLAIN, RANDOM, mode=FORWARD).verdict is Verdict.PASS  # in evaluation mode it draws nothing


def idle(names: frozenset[str]) -> Workload:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any, y: Any) -> Any:
            return self.used(x)

    def make(generator: torch.Generator, _: int) -> Problem:
        return Problem(Idle(), (torch.randn(4, 8, generator=generator), torch.randn(4, generator=generator)))

    return Workload("idle", "Half of it is not used.", make, idle=names)


@pytest.mark.slow
def test_a_gradient_that_the_oracle_lacks_is_an_error_unless_it_is_declared(tmp_path: Path) -> None:
    record = erred(Store(tmp_path), PLAIN, idle(frozenset()), mode=BACKWARD)
    assert "the oracle has no gradient for input[1], unused.bias, unused.weight" in record.why
    declared = idle(frozenset({"input[1]", "unused.bias", "unused.weight"}))
    assert verdict_of(Store(tmp_path), PLAIN, declared, mode=BACKWARD).verdict is Verdict.PASS


def test_generators_are_put_back_in_silence_after_a_case(store: Store) -> None:
    before = Generators.now()

    def draws() -> None:
        random.random(), np.random.rand(), torch.rand(1)

    passed(store, Leaking(draws), seeded("mlp"))
    assert before.moved(Generators.now()) == []


def test_what_torch_puts_around_its_own_functions_is_no_leak() -> None:
    before = GlobalState.now()

    class Own(torch.optim.SGD):
        """Torch puts a function around the `step` of each class when the first optimizer is made."""

    for kind in (Own, torch.optim.AdamW, torch.optim.Adam):
        kind([nn.Parameter(torch.zeros(1))])
    with torch_names.dynamo_config.patch(suppress_errors=True):
        pass
    assert (
        torch.compile(torch.sin, backend="eager")(torch.zeros(1)) == 0
    )  # dynamo puts its own around optimizers' functions
    assert before.restore() == []


def test_a_setting_is_compared_with_its_default_where_its_module_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch_names.dynamo_config
    monkeypatch.delitem(sys.modules, "torch._dynamo.config")
    before = GlobalState.now()
    monkeypatch.undo()
    assert before.restore() == []
    config.suppress_errors = True
    (fault,) = before.restore()
    assert (fault.path, config.suppress_errors) == ("torch._dynamo.config", False)


def test_a_reduced_precision_that_is_left_on_is_put_back() -> None:
    before = GlobalState.now()
    torch.set_float32_matmul_precision("medium")
    (line,) = before.restore()
    assert str(line).startswith("precision of products: left changed: expected ")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("name", LEAKS)
def test_what_is_put_back_for_a_while_is_as_it_is_again(name: str) -> None:
    before = GlobalState.now()
    LEAKS[name]()
    with before.restored():
        assert [change.fault for change in before._changes(whole=False)] == []
    assert before.restore() != []


def test_a_workload_that_leaves_something_changed_is_an_error(tmp_path: Path) -> None:
    def make(generator: torch.Generator, _: int) -> Problem:
        torch.set_default_dtype(torch.float64)
        return Problem(nn.Identity(), (torch.randn(8, 8, generator=generator, dtype=torch.float32),))

    workload = Workload("leaking", "Changes the default dtype.", make)
    clean = clean_process([workload])
    record = verdict_of(Store(tmp_path, clean), PLAIN, workload)
    clean.close()
    assert record.verdict is Verdict.ERROR
    assert "the workload leaves changed what later ones compute with: default dtype" in record.why


def test_an_error_says_what_else_the_case_left_changed(tmp_path: Path) -> None:
    def breaks() -> None:
        torch.set_default_dtype(torch.float64)
        raise RuntimeError("broken")

    record = erred(Store(tmp_path), Leaking(breaks), seeded("mlp"))
    assert record.why.splitlines() == [
        "RuntimeError: broken",
        "default dtype: left changed: expected torch.float32, got torch.float64",
    ]


def test_what_the_judge_computes_with_has_known_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    known_answers.check()
    known_answers.check_views()
    monkeypatch.setattr(functional, "linear", off_by_one_percent)
    with pytest.raises(known_answers.KnownAnswerError, match="linear"):
        known_answers.check()


@pytest.mark.slow
def test_a_wrong_kernel_below_torch_is_an_error_of_the_judge(tmp_path: Path) -> None:
    """Registrations with the dispatcher cannot be undone for a while, but show in the known answers, and are named."""

    class Registered(Planted):
        def prepare(self, program: Program, mode: Mode, device: Device) -> None:
            super().prepare(program, mode, device)
            self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # untyped in torch
            with pytest.warns(UserWarning, match="Overriding"):
                self.library.impl("sqrt", lambda x: x * 1.5, "CPU")  # type: ignore[no-untyped-call]  # as above

        def finish(self) -> None:
            self.library._destroy()  # type: ignore[no-untyped-call]  # as above

    record = erred(Store(tmp_path), Registered(lambda _: None), seeded("mlp"))
    assert "sqrt, on the CPU: expected [7.0, 1.5]" in record.why
    assert "kernels of torch.library: left changed: expected torch's own, got others for aten/sqrt/CPU" in record.why


def test_problems_are_made_under_the_state_before_the_technique(tmp_path: Path) -> None:
    """A technique may change the default dtype while it runs: the inputs of later draws stay those of the oracle."""

    class Wide(Planted):
        def prepare(self, program: Program, mode: Mode, device: Device) -> None:
            super().prepare(program, mode, device)
            torch.set_default_dtype(torch.float64)

        def finish(self) -> None:
            torch.set_default_dtype(torch.float32)

    def make(generator: torch.Generator, _: int) -> Problem:
        return Problem(nn.Tanh(), (torch.randn(8, 8, generator=generator),))  # of the default dtype

    workload = Workload("default-dtype", "Draws in the default dtype.", make)
    assert verdict_of(Store(tmp_path), Wide(lambda _: None), workload).verdict is Verdict.PASS


def test_a_bench_without_a_clean_process_computes_in_this_one(tmp_path: Path) -> None:
    chosen = replace(case(seeded("mlp")), technique="planted")
    assert bench(Store(tmp_path), PLAIN, seeded("mlp"), Bed()).run(chosen).verdict is Verdict.PASS
