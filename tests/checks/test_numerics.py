"""The check of values goes through draws and probes as it says."""

from __future__ import annotations

import copy
import gc
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_harness import (
    BACKWARD,
    FORWARD,
    TRAIN,
    Bed,
    Once,
    Planted,
    bench,
    built_in,
    case,
    erred,
    failed,
    faults,
    passed,
    verdict_of,
)
from torch import Tensor, nn

from accelcheck.checks import calls
from accelcheck.checks.trial import Trial
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import calling, nothing, replacing
from accelcheck.techniques.eager import Eager
from accelcheck.verify.judge import apart
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.verify.reference import Reference, VacuousError
from accelcheck.workloads import probes
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.own_model import workload_of
from accelcheck.workloads.probes import DRAWS, PROBES, Draw, Probe


def every(probe: Probe) -> bool:
    return True


def layout(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def of(*inputs: Tensor, module: nn.Module | None = None) -> Problem:
    return Problem(nn.Identity() if module is None else module, inputs)


def applied(name: str, *inputs: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(PROBES[name].apply(of(*inputs), dtype).inputs)


def watching(happened: list[Any], look: Callable[[nn.Module, Tensor], Any]) -> Change:
    def call(module: Any, x: Tensor) -> Any:
        happened.append(look(module, x))
        return module(x)

    return calling(call)


def addresses(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    return x.data_ptr(), *(p.data_ptr() for p in module.parameters()), *(b.data_ptr() for b in module.buffers())


class WrongOnce(nn.Module):
    """Products, one of which has a large error in every dtype but FP64."""

    def forward(self, x: Tensor) -> Tensor:
        out = x * 1.25
        if x.dtype != torch.float64:
            out[20, 30] += 5.7 * out.float().square().mean().sqrt()
        return out


def test_eager_on_the_cpu_is_no_peer_of_itself(fresh: Store) -> None:
    # Of 2^18 elements one: over all of them, eager errs no more than a peer may.
    workload = Workload("wrong-once", "One.", lambda g, _: of(torch.randn(512, 512, generator=g), module=WrongOnce()))
    record = verdict_of(fresh, Eager(), workload, dtype="bfloat16")
    assert {"row", "column", "block", "element"} <= {view.removeprefix("view ") for view in faults(record)["out"]}
    # Nor of anything else: it is told from the samples, and reported.
    record = verdict_of(fresh, Planted(nothing), workload, dtype="bfloat16")
    assert "view element" in faults(record)["out"]
    assert "eager's element" in {figure.view for figure in record.figures}


SMALL = replace(built_in()["matmul"], name="matmul-probed", probes=frozenset({"nan[0]", "ones", "zeros"}))


def test_parameters_and_inputs_are_refilled_where_they_are(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS", 0)
    happened: list[Any] = []
    passed(fresh, Planted(watching(happened, addresses)), SMALL)
    # The case's own, its rerun, three probes and three other draws: all at one place.
    assert len(happened) == 2 + 3 + 3
    assert len(set(happened)) == 1


def test_every_draw_has_its_own_values(fresh: Store) -> None:
    happened: list[Any] = []
    look = watching(happened, lambda module, x: (float(x.nansum()), float(module.get_parameter("weight").sum())))
    passed(fresh, Planted(look), SMALL)
    assert len({value for value, _ in happened}) == 7  # the rerun's are the first ones
    assert len({weight for _, weight in happened}) == DRAWS  # probes have the first ones


def test_state_is_restored_between_draws(fresh: Store) -> None:
    happened: list[Any] = []
    workload = replace(built_in()["train-mlp"], name="train-mlp-probed")

    def change(program: Program) -> None:
        plain = program.run

        def run(mode: Mode) -> Any:
            happened.append([parameter.detach().clone() for parameter in program.module.parameters()])
            return plain(mode)

        program.run = run  # type: ignore[method-assign]  # on this instance alone

    record = passed(fresh, Planted(change), workload, TRAIN)
    expected = [Draw(number).problem(workload, record.case.seed, "float32").module for number in (0, 0, 1, 2, 3)]
    assert len(happened) == len(expected)
    for seen, module in zip(happened, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(seen, module.parameters(), strict=True))


def baked(program: Program) -> None:
    """Weights as they are now, and the input as it comes."""
    weights = [parameter.detach().clone() for parameter in program.module.parameters()]

    def call(module: Any, x: Tensor) -> Any:
        kept = [parameter.detach().clone() for parameter in module.parameters()]
        for parameter, weight in zip(module.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        out = module(x)
        for parameter, weight in zip(module.parameters(), kept, strict=True):
            parameter.data.copy_(weight)
        return out

    calling(call)(program)


def by_address(program: Program) -> None:
    """Gives the first result of an input's address for good."""
    known: dict[int, Tensor] = {}

    def call(module: Any, x: Tensor) -> Any:
        if x.data_ptr() not in known:
            known[x.data_ptr()] = module(x)
        return known[x.data_ptr()].clone()

    calling(call)(program)


PLAIN_DRAWS = replace(SMALL, name="matmul-unprobed", probes=frozenset())


@pytest.mark.parametrize("change", [baked, by_address])
def test_what_does_not_follow_parameters_and_inputs_fails_from_the_second_draw_on(change: Change, fresh: Store) -> None:
    record = failed(fresh, Planted(change), PLAIN_DRAWS)
    *lines, hint = [line for line in record.why.splitlines() if "in all draws" not in line]
    assert hint.startswith("prepare: stale [draw 1]: expected results that follow parameters and inputs")
    assert "set Planted.bakes to True if it copies parameters" in hint
    assert all(any(f"[draw {number}]" in line for number in (1, 2, 3)) for line in lines), record.why
    assert any("[draw 1]" in line for line in lines)


def baked_coarsely(program: Program) -> None:
    """Weights as they are now, and an error of 1 %."""
    baked(program)
    exact = program.call
    assert exact is not None
    program.call = lambda *inputs: exact(*inputs) * 1.01


def test_what_copies_parameters_and_is_wrong_besides_is_told_of_the_copies(fresh: Store) -> None:
    record = verdict_of(fresh, Planted(baked_coarsely), PLAIN_DRAWS)
    (hint,) = [line for line in record.why.splitlines() if line.startswith("prepare: stale")]
    assert re.search(r"got errors \d\d+ times smaller when prepared anew", hint)
    assert "set Planted.bakes to True if it copies parameters" in hint


class Baking(Planted):
    """Copies parameters when it prepares, and says so."""

    bakes = True

    def __init__(self, change: Change) -> None:
        super().__init__(change)
        self.prepared = self.finished = 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.prepared += 1
        super().prepare(program, mode, device)

    def finish(self) -> None:
        self.finished += 1


def test_what_bakes_is_prepared_anew_for_other_parameters_alone(fresh: Store) -> None:
    technique = Baking(baked)
    passed(fresh, technique, SMALL)
    assert technique.prepared == technique.finished == DRAWS + 1  # and for the case's own again


def test_what_is_wrong_with_the_first_parameters_too_is_not_called_stale(fresh: Store) -> None:
    record = failed(fresh, Planted(calling(lambda module, x: module(x) * 1.01)), SMALL)
    assert "stale" not in record.why


class Copied(Eager):
    bakes = True

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.call = copy.deepcopy(program.module)


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD, TRAIN])
def test_a_module_that_is_called_in_place_of_another_has_its_mode(mode: Mode) -> None:
    program = Program.of(built_in()["train-cnn" if mode is TRAIN else "cnn"].problem(0))
    called = program.call = copy.deepcopy(program.module)
    program.run(mode)
    assert {part.training for part in called.modules()} == {mode is not FORWARD}


def test_an_exact_copy_of_a_network_with_batch_norm_passes(fresh: Store) -> None:
    passed(fresh, Copied(), built_in()["cnn"])


class Resizing(Eager):
    warmups, resizing = 2, True


def test_a_workload_that_says_wrongly_that_it_is_resizable_is_an_error(fresh: Store) -> None:
    workload = Workload(
        "fixed", "One.", lambda g, _: of(torch.randn(3, 4, generator=g)), traits=frozenset({"resizable"})
    )
    record = erred(fresh, Resizing(), workload)
    assert "the workload fixed has the trait `resizable`, but its maker gives inputs of the same sizes" in record.why
    passed(fresh, Resizing(), built_in()["mlp"])


class Featured(Bed):
    def __init__(self, *features: str) -> None:
        super().__init__()
        self.features = frozenset({"strided", *features})


def unsteady(program: Program) -> None:
    """Every call another result, the first the right one, all within rounding."""
    calls: list[int] = []

    def call(module: Any, x: Tensor) -> Any:
        calls.append(1)
        out = module(x)
        return out * (1 + 2.0**-23) if len(calls) == 2 else out

    calling(call)(program)


def test_a_rerun_that_differs_fails_where_the_device_says_that_it_does_not(fresh: Store) -> None:
    workload = replace(PLAIN_DRAWS, name="matmul-rerun")
    record = bench(fresh, Planted(unsteady), workload, Featured("deterministic")).run(case(workload))
    assert faults(record) == {"out": {"rerun"}}
    assert "out: rerun: expected the same bits, got " in record.why


@pytest.mark.parametrize(("traits", "features"), [((), ()), (("unsteady",), ("deterministic",))])
def test_a_rerun_that_differs_is_recorded_where_nothing_promises_the_same_bits(
    traits: tuple[str, ...], features: tuple[str, ...], fresh: Store
) -> None:
    workload = replace(PLAIN_DRAWS, name="matmul-rerun", traits=PLAIN_DRAWS.traits | {*traits})
    record = bench(fresh, Planted(unsteady), workload, Featured(*features)).run(case(workload))
    assert record.verdict is Verdict.PASS, record.why
    (figure,) = (figure for figure in record.figures if figure.view == "rerun")
    assert 0 < figure.measured < 1e-6
    assert not figure.gates


def test_a_lazy_device_that_rounds_by_what_is_alive_is_run_again_with_nothing_left_over(
    fresh: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CALLS", 0)

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    left: list[weakref.ref[Cycle]] = []

    def call(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module(x).clone()
        out[0, 0] *= 1 + sum(reference() is not None for reference in left) * 2.0**-23
        left.append(weakref.ref(Cycle()))
        return out

    workload = replace(PLAIN_DRAWS, name="matmul-left-over")
    before = gc.isenabled()
    gc.collect()
    gc.disable()  # nothing but the check collects
    try:
        lazy = bench(fresh, Planted(calling(call)), workload, Featured("deterministic", "lazy"))
        assert lazy.run(case(workload)).verdict is Verdict.PASS
        left.clear()
        record = bench(fresh, Planted(calling(call)), workload, Featured("deterministic")).run(case(workload))
        assert faults(record) == {"out": {"rerun"}}
        assert not gc.isenabled()
    finally:
        if before:
            gc.enable()


def test_a_lazy_device_that_differs_whatever_is_alive_fails(fresh: Store) -> None:
    calls: list[int] = []

    def call(module: Any, x: Tensor) -> Tensor:
        calls.append(1)
        out: Tensor = module(x).clone()
        if len(calls) % 2:
            out[0, 0] *= 1 + 2.0**-23
        return out

    workload = replace(PLAIN_DRAWS, name="matmul-differing")
    record = bench(fresh, Planted(calling(call)), workload, Featured("deterministic", "lazy")).run(case(workload))
    assert faults(record) == {"out": {"rerun"}}
    assert gc.isenabled()


def test_output_gradients_are_strided_in_odd_draws(fresh: Store) -> None:
    seen: list[bool] = []

    def call(module: Any, x: Tensor) -> Any:
        out = module(x)
        out.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
        return out

    workload = replace(PLAIN_DRAWS, name="matmul-strided")
    passed(fresh, Planted(calling(call)), workload, BACKWARD)
    assert seen == [True, True, False, True, False]  # the second is the rerun


class SquareWithSecond(torch.autograd.Function):
    """Squares; the gradient of its gradient is right only if `factor` is 2."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        # The value 2x, with the derivative that `factor` says.
        return grads[0] * (ctx.factor * x + (2.0 - ctx.factor) * x.detach()), None


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return SquareWithSecond.apply(x, 2.0)  # type: ignore[no-untyped-call]  # untyped in torch


def _squares(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Squares(), (1.0 + torch.rand(8, 8, generator=generator),))


SQUARES = Workload("squares", "Squares.", _squares, traits=frozenset({"custom-function", "twice-differentiable"}))


def wrong_twice(module: Any, x: Tensor) -> Any:
    return SquareWithSecond.apply(x, 2.2)  # type: ignore[no-untyped-call]  # untyped in torch


def test_a_wrong_second_derivative_fails_and_nothing_else_does(fresh: Store) -> None:
    passed(fresh, Planted(nothing), SQUARES, BACKWARD)
    record = verdict_of(fresh, Planted(calling(wrong_twice)), SQUARES, BACKWARD)
    assert faults(record).keys() == {"grad2:input[0]"}


def test_a_technique_without_second_derivatives_is_not_asked_for_them(fresh: Store) -> None:
    passed(fresh, Once(calling(wrong_twice)), SQUARES, BACKWARD)


def test_an_oracle_whose_gradients_are_wrong_is_an_error_of_the_case(fresh: Store) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return wrong_twice(self, x)

    def make(generator: torch.Generator, extent: int) -> Problem:
        return of(torch.rand(4, 4, generator=generator), module=Wrong())

    workload = replace(SQUARES, name="wrong", make=make)
    record = erred(fresh, Planted(nothing), workload, BACKWARD)
    assert "the FP64 oracle raised GradcheckError" in record.why


def test_nan_probes_are_judged_by_pattern(fresh: Store) -> None:
    record = verdict_of(fresh, Planted(calling(lambda module, x: module(x.nan_to_num()))), SMALL)
    assert faults(record) == {"out": {"NaN pattern"}}
    assert "[nan[0]]: expected " in record.why


@pytest.mark.parametrize("probe", ["zeros", "ones"])
def test_what_only_a_probe_shows_is_told_with_its_name(probe: str, fresh: Store) -> None:
    number = float(probe == "ones")

    def special(module: Any, x: Tensor) -> Any:
        return module(x) + 0.5 * float((x == number).all())

    record = failed(fresh, Planted(calling(special)), SMALL)
    assert all(f" [{probe}]: " in line for line in record.why.splitlines())


def test_a_technique_gets_no_probes_that_it_does_not_admit(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS", 0)

    class Choosy(Planted):
        def admits(self, probe: Probe) -> bool:
            return probe.name == "ones"

    happened: list[Any] = []
    look = watching(happened, lambda _, x: (bool(x.isnan().any()), bool((x == 0).all()), bool((x == 1).all())))
    passed(fresh, Choosy(look), SMALL)
    assert [sum(kind) for kind in zip(*happened, strict=True)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("level", "features", "shapes"), [(1, (), 2), (2, (), 1), (1, ("lazy",), 1)], ids=["cheap", "slow", "lazy"]
)
def test_no_other_shape_if_compiled_anew(level: int, features: tuple[str, ...], shapes: int, fresh: Store) -> None:
    happened: list[Any] = []
    technique = Planted(watching(happened, lambda _, x: tuple(x.shape)))
    technique.level = level
    workload = replace(SMALL, name="matmul-sliced-probe", probes=frozenset({"slice"}))
    assert bench(fresh, technique, workload, Featured(*features)).run(case(workload)).verdict is Verdict.PASS
    assert len(set(happened)) == shapes


def test_one_direction_in_all_draws_fails_though_no_draw_is_beyond_its_budget(fresh: Store) -> None:
    workload = replace(built_in()["matmul"], name="matmul-leaning", probes=frozenset())
    # Half a unit of bfloat16 in one direction always: one rounding in any direction is granted.
    record = failed(
        fresh,
        Planted(replacing(out=lambda out: (out.float() * (1 + 2.0**-8)).to(out.dtype))),
        workload,
        FORWARD,
        "bfloat16",
    )
    assert "out: view gain in all draws: expected at most " in record.why


def test_most_faults_are_not_gone_on_with(fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.checks.numerics.MOST_FAULTS", 10)
    happened: list[Any] = []

    def call(module: Any, x: Tensor) -> Any:
        happened.append(1)
        return -module(x)

    assert verdict_of(fresh, Planted(calling(call)), PLAIN_DRAWS).verdict is Verdict.FAIL
    # Each draw shows ten faults or fewer: after 20 no more are drawn; the first is run twice.
    assert len(happened) < 1 + DRAWS


def test_distances_between_two_runs() -> None:
    nan = torch.tensor([math.nan, 3.0, 4.0])
    assert apart({"a": nan}, {"a": nan.clone()}) == {"a": 0.0}
    assert apart({"a": nan}, {"a": torch.tensor([math.nan, 3.0, 4.5])}) == {"a": pytest.approx(0.1)}
    assert apart({"a": nan}, {"a": torch.tensor([0.0, 3.0, 4.0])}) == {"a": math.inf}
    assert apart({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])}) == {"a": 0.0}
    assert apart({"a": nan}, {"a": nan.double()}) == {"a": math.inf}
    assert apart({"a": nan}, {"b": nan}) == {"a": math.inf, "b": math.inf}


def test_warm_ups_meet_no_draw() -> None:
    # Seeds of warm-ups are the case's and the next few; those of draws are far from them and from each other.
    assert all(Draw(number).seed(0) >= probes._STRIDE for number in range(1, DRAWS))


@pytest.mark.parametrize("own", [True, False])
def test_shuffled_numbers_that_rounding_decides_are_left_out_of_an_owners_model_alone(
    monkeypatch: pytest.MonkeyPatch, fresh: Store, *, own: bool
) -> None:
    plain, drawn = Trial.reference, list[Draw]()

    def reference(trial: Trial, draw: Draw = FIRST, **options: Any) -> Reference:
        if draw.number == 2:
            drawn.append(draw)
            raise VacuousError("rounding errors alone decide every tensor")
        return plain(trial, draw, **options)

    monkeypatch.setattr(Trial, "reference", reference)
    workload = workload_of(torch.nn.Linear(4, 3), (torch.rand(5, 4),)) if own else built_in()["mlp"]
    record = verdict_of(fresh, Planted(nothing), workload)
    assert drawn
    assert record.verdict is (Verdict.PASS if own else Verdict.ERROR)
    assert any("rounding errors alone decide" in claim.claim for claim in record.evidence) is own
