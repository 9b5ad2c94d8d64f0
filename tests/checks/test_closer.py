"""Each part of a divisible workload is looked at more closely by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, passed, verdict_of
from torch import Tensor

from accelcheck.core.case import Mode, Verdict
from accelcheck.verify.oracle import Store
from accelcheck.verify.reference import Reference, VacuousError
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.function_parts import Functions
from accelcheck.workloads.problem import part_of

PARTS = ("exp", "sin", "of both")


def both(x: Tensor, y: Tensor) -> Tensor:
    return x.tanh() + y.tanh()


def make(generator: torch.Generator, extent: int) -> Problem:
    parts = (("exp", torch.exp, (0,)), ("sin", torch.sin, (1,)), ("of both", both, (1, 2)))
    return Problem(Functions(parts), tuple(torch.randn(4, 9, generator=generator) for _ in range(3)))


WORKLOAD = Workload("parted", "Some parts.", make, divisible=True, given=True)


class Recorder(Store):
    """References with a hundredth of some budgets in the first look; remembers who asked for closer looks.

    Args:
        folder: Folder of the references.
        tight: Starts of the paths that have less.
        factor: By which later looks have less too.
    """

    def __init__(self, folder: Path, *tight: str, factor: float = 1.0) -> None:
        super().__init__(folder)
        self.tight, self.factor = tight, factor
        self.looks = list[tuple[str, int]]()
        self.algorithms = list[tuple[str, str]]()

    def get(self, case: Any, technique: Any, workload: Any, *args: Any, **options: Any) -> Reference:
        careful, algorithm = options.get("careful", 0), options.get("algorithm")
        if careful and not algorithm:
            self.looks.append((workload.name, careful))
        if algorithm:
            self.algorithms.append((workload.name, algorithm))
        reference = super().get(case, technique, workload, *args, **options)
        factor = self.factor if careful else 1e-2
        budgets = {
            path: {view: budget * factor for view, budget in views.items()} if path.startswith(self.tight) else views
            for path, views in reference.budgets.items()
        }
        return replace(reference, budgets=budgets, noise={})


def technique(wrong: str = "") -> Planted:
    """Eager, with another result of one part."""

    def call(module: Any, *inputs: Tensor) -> dict[str, Tensor]:
        return {label: out * (1.5 if label == wrong else 1.0) for label, out in module(*inputs).items()}

    def change(program: Program) -> None:
        program.call = partial(call, program.module)

    return Planted(change)


@pytest.fixture(autouse=True)
def _all_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.verify.judge.CLOSE", (1e3, 1e3))


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("out['exp']", "exp"),
        ("out['sin'][0]", "sin"),
        ("out['sine']", ""),
        ("grad:input[0]", "exp"),
        ("grad:input[1]", ""),
        ("grad:input[2]", "of both"),
        ("grad:input[3]", ""),
        ("written:input[0]", ""),
    ],
)
def test_the_part_of_a_result_is_that_which_alone_decides_it(path: str, part: str) -> None:
    module: Any = WORKLOAD.problem(1).module
    assert part_of(module, path) == part


def test_a_part_alone_has_the_same_inputs_and_the_paths_of_the_whole() -> None:
    whole, part = WORKLOAD.problem(7), WORKLOAD.only("sin").problem(7)
    assert all(torch.equal(first, other) for first, other in zip(whole.inputs, part.inputs, strict=True))
    assert list(part.module(*part.inputs)) == ["sin"]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("close", "factor", "mode", "looks"),
    [
        ("out['exp']", 1.0, FORWARD, {("parted~exp", 1)}),
        ("grad:input[1]", 1.0, BACKWARD, {("parted", 1)}),
        ("out['exp']", 1e-2, FORWARD, {("parted~exp", 1), ("parted~exp", 2)}),
    ],
    ids=["a part", "a gradient of several parts", "a second look"],
)
def test_closer_looks_are_of_the_parts_whose_result_is_close(
    close: str, factor: float, mode: Mode, looks: set[tuple[str, int]], tmp_path: Path
) -> None:
    store = Recorder(tmp_path, close, factor=factor)
    record = verdict_of(store, technique(), WORKLOAD, mode)
    assert record.verdict is (Verdict.PASS if factor == 1.0 else Verdict.FAIL)
    assert set(store.looks) == looks


@pytest.mark.parametrize("part", ["sin", "of both"])
def test_a_closer_look_at_a_part_says_nothing_of_gradients_of_several_parts(part: str, tmp_path: Path) -> None:
    store = Recorder(tmp_path, f"out['{part}']")
    passed(store, technique(), WORKLOAD, BACKWARD)
    assert set(store.looks) == {(f"parted~{part}", 1)}


@pytest.mark.slow
def test_an_algorithm_of_a_part_says_nothing_of_a_gradient_that_other_parts_decide_too(tmp_path: Path) -> None:
    store = Recorder(tmp_path, "out['of both']", factor=1e-2)
    record = verdict_of(store, technique(), WORKLOAD, BACKWARD)
    assert {fault.path for fault in record.faults} <= {"out['of both']"}, record.why


def test_a_part_that_stays_beyond_its_budget_fails_beside_one_that_does_not(tmp_path: Path) -> None:
    store = Recorder(tmp_path, "out['exp']", "out['sin']")
    record = failed(store, technique(wrong="sin"), WORKLOAD)
    assert {fault.path for fault in record.faults} == {"out['sin']"}
    assert ("parted~exp", 1) in store.looks


def test_a_part_that_its_own_samples_cannot_judge_keeps_the_first_judgement(tmp_path: Path) -> None:
    class Vacuous(Recorder):
        def get(self, case: Any, technique: Any, workload: Any, *args: Any, **options: Any) -> Reference:
            if "~" in workload.name:
                raise VacuousError("rounding decides it")
            return super().get(case, technique, workload, *args, **options)

    record = failed(Vacuous(tmp_path, "out['exp']"), technique(), WORKLOAD)
    assert {fault.path for fault in record.faults} == {"out['exp']"}


def test_a_class_of_algorithms_that_a_part_has_no_operator_of_is_asked_for_once(tmp_path: Path) -> None:
    store = Recorder(tmp_path, "out['exp']", factor=1e-2)
    assert verdict_of(store, technique(), WORKLOAD).verdict is Verdict.FAIL
    asked = Counter(store.algorithms)
    assert {name for name, _ in asked} == {"parted~exp"}
    assert max(asked.values()) <= 2  # of five draws; what is wrong is prepared anew once
