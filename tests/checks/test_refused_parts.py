"""Parts of a workload that a technique refuses are named, and the others are judged."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import Bed, Planted, bench, built_in, case, failed, passed, verdict_of
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from accelcheck.checks import numerics
from accelcheck.checks.trial import reason_of
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.verify.oracle import Store
from accelcheck.verify.reference import OracleError
from accelcheck.workloads import operator_samples
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.function_parts import Functions
from accelcheck.workloads.operator_samples import CalledOperator

LABELS = tuple("abcdefg")


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


def test_refused_parts_are_named_with_what_they_raise_and_the_others_pass(fresh: Store) -> None:
    record = passed(fresh, refusing(has("b", "f")), workload())
    assert record.refused == {label: f"RuntimeError: no kernel for {label}" for label in "bf"}
    assert record.compared == 5 * (len(LABELS) - 2) * 4
    assert any("b (RuntimeError: no kernel for b)" in str(entry.observed) for entry in record.evidence)


def test_a_part_beside_refused_ones_is_judged(fresh: Store) -> None:
    record = failed(fresh, refusing(has("b"), wrong="c"), workload())
    assert {fault.path for fault in record.faults} == {"out['c']"}
    assert set(record.refused) == {"b"}


@pytest.mark.parametrize("refuses", [has(*LABELS), lambda labels: len(labels) > 1], ids=["all", "together"])
def test_what_refuses_all_parts_or_only_several_together_is_an_error(refuses: Any, fresh: Store) -> None:
    record = verdict_of(fresh, refusing(refuses), workload())
    assert (record.verdict, record.refused) == (Verdict.ERROR, {})
    assert "no kernel for a, b, c" in record.reason


def test_a_model_that_is_not_divisible_is_an_error_as_a_whole(fresh: Store) -> None:
    assert verdict_of(fresh, refusing(has("b")), workload(divisible=False)).verdict is Verdict.ERROR


def test_a_part_that_raises_in_eager_is_a_fault_and_the_others_are_judged(fresh: Store) -> None:
    technique = refusing(has("b"), wrong="c")
    technique.family = "eager"
    record = failed(fresh, technique, workload())
    assert str(record.faults[0]) == "out['b']: raised: expected a result, got RuntimeError: no kernel for b"
    assert {fault.path for fault in record.faults[1:]} == {"out['c']"}
    assert set(record.refused) == {"b"}


class Lazy(Bed):
    """A lazy device: every call fails while a tensor that cannot be computed is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.calls = 0

    def synchronize(self) -> None:
        self.calls += 1
        if self.broken:
            raise RuntimeError(f"cannot lower the graph of call {self.calls}")


def breaking(device: Lazy, refuses: Callable[[tuple[str, ...]], bool]) -> Planted:
    def call(module: Any, *inputs: Tensor) -> dict[str, Tensor]:
        result = dict(module(*inputs))
        if refuses(module.labels):
            device.broken.add(result[module.labels[0]])
            device.synchronize()
        return result

    def change(program: Program) -> None:
        program.call = partial(call, program.module)

    return Planted(change)


def test_what_a_failed_run_leaves_alive_does_not_fail_the_next_run(fresh: Store) -> None:
    device = Lazy()
    record = bench(fresh, breaking(device, has("b")), workload(), device).run(case(workload()))
    assert record.verdict is Verdict.PASS, record.why
    assert set(record.refused) == {"b"}


def test_a_device_whose_failed_run_left_tensors_alive_is_not_lost(fresh: Store) -> None:
    device = Lazy()
    record = bench(fresh, breaking(device, has(*LABELS)), workload(), device).run(case(workload()))
    assert record.verdict is Verdict.ERROR, record.reason
    assert "cannot lower the graph" in record.reason


def test_in_eager_all_parts_with_gradients_may_raise(fresh: Store) -> None:
    operators = (CalledOperator("add", ("float32",)), CalledOperator("argmax", ("float32",), gradients=False))
    made = partial(operator_samples.make, operators=operators, most=1)
    mixed = Workload("mixed", "A derivative.", made, divisible=True, given=True)
    technique = refusing(lambda labels: any(label.startswith("add") for label in labels))
    technique.family = "eager"
    record = failed(fresh, technique, mixed, Mode.BACKWARD)
    (label,) = record.refused
    assert str(record.faults[0]).startswith(f"out['{label}']: raised: expected a result, got RuntimeError: no kernel")


def test_an_oracle_that_fails_beside_a_part_that_raises_is_an_error(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([RuntimeError("no kernel"), OracleError("no truth")])

    def finding(run: Any, chosen: Any = None) -> Any:
        raise next(errors)

    monkeypatch.setattr(numerics._Run, "finding", finding)
    technique = refusing(has("b"))
    technique.family = "eager"
    record = verdict_of(fresh, technique, workload())
    assert record.verdict is Verdict.ERROR
    assert "no truth" in record.reason


def test_a_reference_without_some_parts_is_another_one(fresh: Store) -> None:
    technique = refusing(has("b"))
    assert verdict_of(fresh, technique, workload()).verdict is Verdict.PASS
    assert verdict_of(fresh, Planted(lambda _: None), workload()).compared == 5 * len(LABELS) * 4


def test_a_module_without_labels_cannot_be_divided() -> None:
    plain = Workload("whole", "One part.", lambda *_: Problem(nn.Identity(), (torch.ones(2),)), divisible=True)
    with pytest.raises(TypeError, match="expected a module with `labels`, `without` and `readers`, got Identity"):
        plain.without(frozenset({"a"})).problem(1)


def test_the_exception_that_led_to_others_is_the_reason() -> None:
    led = RuntimeError("\x1b[96mstep 3 of 3 failed")
    assert reason_of(led) == "RuntimeError: step 3 of 3 failed"
    led.__cause__ = KeyError("aten.i0")
    assert reason_of(led) == "KeyError: 'aten.i0'"


def test_refused_parts_are_kept_in_a_journal(fresh: Store) -> None:
    record = verdict_of(fresh, refusing(has("b")), workload())
    assert Record.from_json(record.as_json()).refused == record.refused


@pytest.mark.parametrize("name", ["values-near", "ops-loss-1"])
def test_a_workload_without_some_parts_reaches_the_process_of_references(name: str) -> None:
    less = pickle.loads(pickle.dumps(built_in()[name].without(frozenset({"round of ties"}))))
    assert less.name.startswith(f"{name}~")


def test_a_part_that_raises_only_under_a_dispatch_mode_is_refused(fresh: Store) -> None:
    def call(module: Any, *inputs: Tensor) -> dict[str, Tensor]:
        if "b" in module.labels and _get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return dict(module(*inputs))

    def change(program: Program) -> None:
        program.call = partial(call, program.module)

    record = passed(fresh, Planted(change), workload())
    assert record.refused == {"b": "RuntimeError: not under a mode"}


def test_a_narrowed_workload_has_the_inputs_that_its_parts_read_and_the_same_results() -> None:
    less = replace(workload(), make=written).without(frozenset("bcdg"))
    whole, narrow = less.problem(3), less.narrowed().problem(3)
    assert [any(torch.equal(value, other) for other in narrow.inputs) for value in whole.inputs] == [
        label in "aef" for label in LABELS
    ]
    assert narrow.writes == {2}
    expected = whole.module(*whole.inputs)
    assert narrow.module(*narrow.inputs).keys() == expected.keys() == set("aef")
    assert all(torch.equal(out, expected[label]) for label, out in narrow.module(*narrow.inputs).items())


class Named(nn.Module):
    """Two parts, with arguments that have names."""

    def __init__(self, labels: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.labels = labels

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {label: {"a": x, "b": y}[label] * 2 for label in self.labels}

    def without(self, labels: frozenset[str]) -> Named:
        return Named(tuple(label for label in self.labels if label not in labels))

    def readers(self, place: int) -> frozenset[str]:
        return frozenset(self.labels) & ({"a"}, {"b"}, set())[place]


def test_a_narrowed_module_gets_all_of_its_arguments(fresh: Store) -> None:
    def made(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Named(), tuple(torch.randn(5, generator=generator) for _ in range(3)))

    named = Workload("named", "Two parts.", made, divisible=True, modes=frozenset({Mode.FORWARD}))
    assert named.without(frozenset({"b"})).narrowed().problem(0).module(torch.ones(5)).keys() == {"a"}
    record = verdict_of(fresh, refusing(has("b")), named)
    assert record.refused == {"b": "RuntimeError: no kernel for b"}, record.why


def written(generator: torch.Generator, extent: int) -> Problem:
    return replace(make(generator, extent), writes=frozenset({1, 5}))


def exponents(generator: torch.Generator, extent: int) -> Problem:
    problem = make(generator, extent)
    return replace(problem, module=Functions(tuple((label, torch.exp, (place,)) for place, label in enumerate(LABELS))))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("spoil", "seen"),
    [
        (lambda out: out.double(), {"dtype"}),
        (lambda out: out[:-1], {"shape"}),
        (lambda out: out.to("meta"), {"device"}),
        (lambda out: torch.stack((out + 1, out), -1)[:, 0], {"strides", "row"}),
    ],
    ids=["dtype", "shape", "device", "strides"],
)
@pytest.mark.parametrize("divisible", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("error", [1.0, 4e-6], ids=["far", "close"])
def test_wrong_metadata_of_a_tensor_hides_no_values_of_others(
    error: float, divisible: bool, spoil: Any, seen: set[str], fresh: Store
) -> None:
    def call(module: Any, *inputs: Tensor) -> dict[str, Tensor]:
        outs = module(*inputs)
        return {**outs, "a": spoil(outs["a"]), "b": outs["b"] * (1 + error)}

    def change(program: Program) -> None:
        program.call = partial(call, program.module)

    record = verdict_of(
        fresh, Planted(change, keeps_strides=True), replace(workload(divisible=divisible), make=exponents)
    )
    views: dict[str, set[str]] = {}
    for fault in record.faults:
        views.setdefault(fault.path, set()).add(fault.view)
    assert views.keys() == {"out['a']", "out['b']"}
    assert views["out['a']"] & {"dtype", "shape", "device", "strides", "row"} == seen
    assert views["out['b']"]


def test_a_part_that_is_left_out_writes_to_no_input() -> None:
    writing = Workload("writing", "Parts of which two write.", written, divisible=True)
    assert writing.problem(0).writes == {1, 5}
    assert writing.without(frozenset({LABELS[1]})).problem(0).writes == {5}
    assert writing.only(LABELS[5]).problem(0).writes == {5}
    assert writing.only(LABELS[0]).problem(0).writes == frozenset()
