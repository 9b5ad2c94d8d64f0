"""Parts of a workload that a technique refuses are named, and the others are judged."""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_harness import Planted, built_in, verdict_of
from torch import Tensor, nn

from accelcheck.checks import numerics
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.families import Functions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from accelcheck.workloads.base import Program

LABELS = tuple("abcdefg")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def make(generator: torch.Generator, extent: int) -> Problem:
    parts = tuple((label, doubled, (place,)) for place, label in enumerate(LABELS))
    return Problem(Functions(parts), tuple(torch.randn(5, generator=generator) for _ in LABELS))


def workload(*, divisible: bool = True) -> Workload:
    return Workload("parted", "Some parts.", make, divisible=divisible, modes=frozenset({Mode.FORWARD}))


def refusing(refuses: Callable[[tuple[str, ...]], bool], wrong: str = "") -> Planted:
    """A technique that raises for some sets of parts, and gives another result for one of them."""

    def call(module: Any, *inputs: Tensor) -> dict[str, Tensor]:
        if refuses(module.labels):
            raise RuntimeError(f"no kernel for {', '.join(module.labels)}")
        return {label: out + (label == wrong) for label, out in module(*inputs).items()}

    def change(program: Program) -> None:
        program.call = partial(call, program.module)

    return Planted(change)


def has(*refused: str) -> Callable[[tuple[str, ...]], bool]:
    return lambda labels: bool(set(refused) & set(labels))


def test_refused_parts_are_named_with_what_they_raise_and_the_others_pass(store: Store) -> None:
    record = verdict_of(store, refusing(has("b", "f")), workload())
    assert record.verdict is Verdict.PASS, record.why
    assert record.refused == {label: f"RuntimeError: no kernel for {label}" for label in "bf"}
    assert record.compared == 5 * (len(LABELS) - 2) * 4
    assert any("b (RuntimeError: no kernel for b)" in str(one.observed) for one in record.evidence)


def test_a_part_beside_refused_ones_is_judged(store: Store) -> None:
    record = verdict_of(store, refusing(has("b"), wrong="c"), workload())
    assert record.verdict is Verdict.FAIL
    assert {fault.path for fault in record.faults} == {"out['c']"}
    assert set(record.refused) == {"b"}


@pytest.mark.parametrize("refuses", [has(*LABELS), lambda labels: len(labels) > 1], ids=["all", "together"])
def test_what_refuses_all_parts_or_only_several_together_is_an_error(refuses: Any, store: Store) -> None:
    record = verdict_of(store, refusing(refuses), workload())
    assert (record.verdict, record.refused) == (Verdict.ERROR, {})
    assert "no kernel for a, b, c" in record.reason


def test_a_model_that_is_not_divisible_is_an_error_as_a_whole(store: Store) -> None:
    assert verdict_of(store, refusing(has("b")), workload(divisible=False)).verdict is Verdict.ERROR


def test_what_eager_refuses_is_an_error(store: Store) -> None:
    technique = refusing(has("b"))
    technique.family = "eager"
    assert verdict_of(store, technique, workload()).verdict is Verdict.ERROR


def test_a_reference_without_some_parts_is_another_one(store: Store) -> None:
    technique = refusing(has("b"))
    assert verdict_of(store, technique, workload()).verdict is Verdict.PASS
    assert verdict_of(store, Planted(lambda _: None), workload()).compared == 5 * len(LABELS) * 4


def test_a_module_without_labels_cannot_be_divided() -> None:
    plain = Workload("whole", "One part.", lambda *_: Problem(nn.Identity(), (torch.ones(2),)), divisible=True)
    with pytest.raises(TypeError, match="expected a module with `labels` and `without`, got Identity"):
        plain.without(frozenset({"a"})).problem(1)


def test_the_exception_that_led_to_others_is_the_reason() -> None:
    led = RuntimeError("\x1b[96mstep 3 of 3 failed")
    assert numerics._reason(led) == "RuntimeError: step 3 of 3 failed"
    led.__cause__ = KeyError("aten.i0")
    assert numerics._reason(led) == "KeyError: 'aten.i0'"


def test_refused_parts_are_kept_in_a_journal(store: Store) -> None:
    record = verdict_of(store, refusing(has("b")), workload())
    assert Record.from_json(record.as_json()).refused == record.refused


@pytest.mark.parametrize("name", ["values-near", "ops-loss-1"])
def test_a_workload_without_some_parts_reaches_the_process_of_references(name: str) -> None:
    less = pickle.loads(pickle.dumps(built_in()[name].without(frozenset({"round of ties"}))))
    assert less.name.startswith(f"{name}~")
