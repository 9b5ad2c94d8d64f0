"""Long trainings: planted faults are caught, correct techniques pass, resumption is bitwise, judgement is pure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from fault_harness import Planted, built_in, erred, seeded, verdict_of
from technique_harness import named
from torch.nn import functional

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques import eager
from accelcheck.techniques.base import Technique
from accelcheck.techniques.layout import views
from accelcheck.techniques.memory import checkpoint
from accelcheck.techniques.observe import OperatorLog
from accelcheck.techniques.precision import amp
from accelcheck.verify import ensemble, trajectory
from accelcheck.verify.cache import Cache
from accelcheck.verify.oracle import Store
from accelcheck.verify.trajectory import LATE, REACH, SEEDS, Course, chart, distance, judge, quantity, step
from accelcheck.workloads.base import Program, Result, Workload
from accelcheck.workloads.trainer import Loader, Parts, Trainable, Trainer, milestone

MLP = "trajectory-mlp"
NUMBERS = (0, 1, 2)
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-2)


@pytest.fixture(autouse=True)
def _two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A course of fewer samples costs less, and allows less; the faults exceed that of four
    samples 200 times and more."""
    monkeypatch.setattr(ensemble, "SAMPLES", 2)


def verdict(store: Store, technique: Technique, number: int = 0, name: str = MLP) -> Record:
    return verdict_of(store, technique, seeded(name, number), Mode.TRAJECTORY)


def program(seed: int = 0, steps: int = 6) -> tuple[Program, Trainer]:
    made = Program.of(built_in()[MLP].problem(seed), seed=seed)
    made.steps = steps
    assert made.trainer is not None
    torch.manual_seed(seed)
    return made, made.trainer


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 128.0, **options})


class Unwatched(OperatorLog):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Sees nothing, and costs nothing: plants need no evidence."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return


class Plant(Planted):
    watch = Unwatched


def trainer_of(program: Program) -> Trainer:
    assert program.trainer is not None
    return program.trainer


def optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Change:
    return lambda program: setattr(program, "optimizer", make)


def scaling(make: Callable[[], torch.amp.GradScaler] = scaler) -> Change:
    return lambda program: setattr(program, "scaler", make())


def part(**methods: Callable[..., Any]) -> Change:
    """Methods of the trainer, replaced."""

    def change(program: Program) -> None:
        for name, method in methods.items():
            setattr(trainer_of(program), name, method)

    return change


def leave_out(*given: Any) -> None:
    del given


def both(*changes: Change) -> Change:
    def change(program: Program) -> None:
        for item in changes:
            item(program)

    return change


def late_unscale(program: Program) -> None:
    """Clipped while scaled: `step` unscales what nobody did."""
    program.scaler = scaler()
    part(unscale=leave_out)(program)


def not_restoring(key: str) -> Change:
    """The saved state is complete; one part of it is not put back."""

    def change(program: Program) -> None:
        trainer = trainer_of(program)
        plain = trainer.load

        def load(program: Trainable, parts: Parts, state: Mapping[str, Any]) -> None:
            plain(program, parts, {**state, key: fresh(program, parts)[key]})

        def fresh(program: Trainable, parts: Parts) -> Mapping[str, Any]:
            return trainer.state(program, parts)

        trainer.load = load  # type: ignore[method-assign]  # on this instance alone

    return change


def early_schedule(program: Program) -> None:
    trainer = trainer_of(program)
    make = trainer.recipe.schedule

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        made = make(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch sees the fault too
            made.step()
        return made

    trainer.recipe = replace(trainer.recipe, schedule=schedule)


def half_loss(program: Program) -> None:
    """A reduction over classes and samples that autocast should have kept in FP32."""
    program.loss = lambda out, target: functional.cross_entropy(out.half(), target).float()


class AlwaysStepping(torch.amp.GradScaler):
    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


class NotBackingOff(torch.amp.GradScaler):
    def get_backoff_factor(self) -> float:
        return 0.5

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        if self.get_scale() < before:
            super().update(before)


class NotCountingAnew(torch.amp.GradScaler):
    """An infinite gradient does not reset the count of clean steps."""

    def update(self, new_scale: Any = None) -> None:
        before, scale = self.state_dict()["_growth_tracker"], self.get_scale()
        super().update(new_scale)
        if self.get_scale() < scale and self._growth_tracker is not None:
            self._growth_tracker.fill_(before)


class HalfStates(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16().float()
        return out


class LostUpdates(torch.optim.SGD):
    """Parameters are kept in bfloat16: updates below their spacing vanish."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(parameter.bfloat16())
        return out


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the start of a line that must name it."""

    name: str
    change: Change
    named: str


FAULTS = (
    Fault("clipped before it is unscaled", late_unscale, " [initial scale 65536]: "),
    Fault("a step taken with an infinite gradient", scaling(partial(AlwaysStepping, "cpu", 128.0)), "scaler: step 2"),
    Fault("the scale is never lowered", scaling(partial(NotBackingOff, "cpu", 128.0)), "scaler: scale after step 2"),
    Fault("clean steps counted on", scaling(partial(NotCountingAnew, "cpu", 128.0)), "scaler: scale after step 3"),
    Fault("a reduction in fp16", half_loss, "loss["),
    Fault("resumed without the optimizer", not_restoring("optimizer"), " [resumed]: "),
    Fault("resumed without the scaler", both(scaling(), not_restoring("scaler")), "scaler: scale after step"),
    Fault("resumed without the generator", not_restoring("generator"), "loss[25]: not as without the stop [resumed]"),
    Fault(
        "resumed without the loader's position", not_restoring("loader"), "loss[25]: not as without the stop [resumed]"
    ),
    Fault("resumed without the schedule", not_restoring("schedule"), " [resumed]: "),
    Fault("momentum ignored", optimizer(partial(SGD, momentum=0.0)), "parameter:"),
    Fault("weight decay ignored", optimizer(partial(SGD, weight_decay=0.0)), "parameter:"),
    Fault("schedule one step early", early_schedule, "parameter:"),
    Fault("optimizer's states in half precision", optimizer(partial(HalfStates, **SGD.keywords)), "parameter:"),
    Fault("accumulated and not divided", part(share=lambda loss: loss), "norm["),
    Fault("updates lost in bfloat16", optimizer(partial(LostUpdates, **SGD.keywords)), "parameter:"),
    Fault("not clipped", part(clip=lambda p: torch.nn.utils.clip_grad_norm_(p.module.parameters(), 1e9)), "parameter:"),
)


@pytest.mark.slow
def test_reference_trainings_seed_no_other_device(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    workload = built_in()[MLP]
    case = Case("eager", MLP, "cpu", "float32", Mode.TRAJECTORY, level=1)
    ensemble.course(store.cache, case, eager.Eager(), workload)
    assert seeded == []


@pytest.mark.slow
def test_eager_trains_from_each_seed_once_for_all_precisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    real = ensemble._other

    def other(workload: Workload, case: Case, number: int) -> Result:
        trained.append(number)
        return real(workload, case, number)

    monkeypatch.setattr(ensemble, "_other", other)
    case = Case("eager", MLP, "cpu", "float32", Mode.TRAJECTORY, level=1)
    for technique in (eager.Eager(), named(amp.TECHNIQUES, "amp-bf16")):
        ensemble.course(Cache(tmp_path), case, technique, built_in()[MLP])
    assert trained == list(range(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(store: Store, fault: Fault, number: int) -> None:
    record = verdict(store, Plant(fault.change), number)
    assert record.verdict is Verdict.FAIL, record.why + record.traceback
    assert any(fault.named in line for line in record.why.splitlines()), record.why


TECHNIQUES = (
    *eager.TECHNIQUES,
    named(amp.TECHNIQUES, "amp-bf16"),
    named(amp.TECHNIQUES, "grad-scaler-fp16"),
    named(checkpoint.TECHNIQUES, "checkpoint-reentrant"),
    named(checkpoint.TECHNIQUES, "checkpoint-non-reentrant"),
)
VARIANTS = {
    "foreach": Plant(optimizer(partial(SGD, foreach=True))),
    "fused": Plant(optimizer(partial(SGD, fused=True))),
    "scaled": Plant(scaling()),
    "warmed up": Plant(nothing, warmups=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_a_correct_technique_passes(store: Store, technique: Technique, number: int) -> None:
    record = verdict(store, technique, number)
    assert record.verdict is Verdict.PASS, record.why + record.traceback
    assert {figure.view for figure in record.figures} == {"loss", "norm", "parameter", "mean loss", "mean norm"}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("technique", VARIANTS.values(), ids=VARIANTS.keys())
def test_another_correct_way_to_train_passes(store: Store, technique: Technique) -> None:
    record = verdict(store, technique)
    assert record.verdict is Verdict.PASS, record.why + record.traceback


@pytest.mark.slow
def test_autocast_that_reduces_in_half_is_caught_by_the_dtype_of_the_loss(store: Store) -> None:
    class Halved(type(named(amp.TECHNIQUES, "amp-bf16"))):  # type: ignore[misc]  # a class that only its module names
        def prepare(self, program: Program, mode: Mode, device: Any) -> None:
            super().prepare(program, mode, device)
            program.loss = lambda out, target: functional.cross_entropy(out.float(), target).bfloat16()

    record = verdict(store, Halved("amp-bf16", torch.bfloat16))
    assert "loss[0]: metadata: expected torch.float32 on cpu, got torch.bfloat16 on cpu" in record.why


@pytest.mark.slow
def test_a_data_set_that_is_written_to_is_caught(store: Store) -> None:
    def writing(program: Program) -> None:
        def update(*given: Any) -> None:
            plain(*given)
            program.inputs[0][0].zero_()

        plain = trainer_of(program).update
        setattr(trainer_of(program), "update", update)  # noqa: B010 - mypy knows methods by their exact signatures

    assert "input[0]: mutated" in verdict(store, Plant(writing)).why


def noisy(drawn: torch.Generator) -> Change:
    """A unit of the last place more, sometimes: as atomic additions in another order do."""

    def change(program: Program) -> None:
        module = program.module
        program.call = lambda x: module(x) * (1 + 2.0**-24 * torch.randint(0, 3, (), generator=drawn))

    return change


@pytest.mark.slow
def test_a_device_that_never_repeats_may_resume_within_rounding_and_from_the_right_state(store: Store) -> None:
    record = verdict(store, Plant(noisy(torch.Generator().manual_seed(0))))
    assert record.verdict is Verdict.PASS, record.why
    assert any("does not repeat bitwise" in str(entry.observed) for entry in record.evidence)
    wrong = both(noisy(torch.Generator().manual_seed(0)), not_restoring("optimizer"))
    record = verdict(store, Plant(wrong))
    assert any(" [resumed]: " in line for line in record.why.splitlines()), record.why


def test_a_workload_without_a_recipe_is_an_error_that_says_so(store: Store) -> None:
    train = replace(built_in()["train-mlp"], name="no-recipe", modes=frozenset({Mode.TRAJECTORY}))
    record = erred(store, Plant(nothing), train, Mode.TRAJECTORY)
    assert "recipe" in record.why


def test_views_of_the_data_set_mean_nothing_here() -> None:
    assert all(Mode.TRAJECTORY not in technique.modes for technique in views.TECHNIQUES)


def test_a_training_repeats_bitwise_from_the_beginning() -> None:
    def run() -> Result:
        made, _ = program()
        return made.run(Mode.TRAJECTORY)

    first, other = run(), run()
    assert first.keys() == other.keys()
    assert all(torch.equal(first[path], other[path]) for path in first)


def test_a_training_resumed_in_another_program_goes_on_bitwise() -> None:
    straight, _ = program(steps=8)
    expected = straight.run(Mode.TRAJECTORY)
    first, before = program(steps=3)
    first.run(Mode.TRAJECTORY)
    second, after = program(seed=1, steps=5)
    second.inputs, second.target = first.inputs, first.target
    after.start = before.save(first)
    resumed = second.run(Mode.TRAJECTORY)
    assert {path for path in expected if step(path) >= 3} == resumed.keys()
    assert all(torch.equal(expected[path], resumed[path]) for path in resumed)


def test_what_was_saved_stays_when_the_training_goes_on() -> None:
    made, trainer = program(steps=1)
    made.run(Mode.TRAJECTORY)
    saved, kept = trainer.save(made), trainer.save(made)
    made.run(Mode.TRAJECTORY)
    assert saved == kept != trainer.save(made)


def test_nothing_can_be_saved_before_a_run() -> None:
    made, trainer = program()
    with pytest.raises(ValueError, match="train first"):
        trainer.save(made)


def test_gradients_of_accumulated_mini_batches_are_averaged() -> None:
    made, trainer = program(steps=1)
    trainer.recipe = replace(trainer.recipe, augment=lambda inputs: inputs)
    parts = trainer.parts(made)
    rows = torch.cat([parts.loader.draw() for _ in range(trainer.recipe.accumulation)])
    assert made.loss is not None
    assert made.target is not None
    loss = made.loss(made.module(made.inputs[0][rows]), made.target[rows])
    gradients = torch.autograd.grad(loss, list(made.module.parameters()))
    result = made.run(Mode.TRAJECTORY)
    torch.testing.assert_close(result["loss[0]"], loss.detach())
    torch.testing.assert_close(result["norm[0]"], torch.cat([g.flatten() for g in gradients]).norm())


def test_some_steps_are_clipped_and_some_are_not() -> None:
    for seed in NUMBERS:
        made, trainer = program(seed, steps=50)
        result = made.run(Mode.TRAJECTORY)
        clipped = sum(float(result[f"norm[{at}]"]) > trainer.recipe.clip for at in range(50))
        assert 5 <= clipped <= 45


def test_a_loader_gives_every_row_once_an_epoch_in_another_order_each() -> None:
    loader = Loader(12, 4, seed=0)
    epochs = [torch.cat([loader.draw() for _ in range(4)]) for _ in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert not torch.equal(*epochs)


def test_a_loader_goes_on_from_where_another_stood() -> None:
    first, other = Loader(12, 4, seed=0), Loader(12, 4, seed=1)
    for _ in range(5):
        first.draw()
    other.load_state_dict(first.state_dict())
    assert [first.draw().tolist() for _ in range(9)] == [other.draw().tolist() for _ in range(9)]


def test_milestones() -> None:
    assert [at for at in range(1, 41) if milestone(at)] == [1, 2, 4, 8, 10, 16, 20, 30, 32, 40]


# The judgement

STEPS = 20


def always(value: float) -> Callable[[int], float]:
    def at(step: int) -> float:
        return value

    return at


STEADY, NEAR = always(1.0), always(1e-6)


def training(loss: Callable[[int], float] = STEADY, end: float = 2.0) -> Result:
    """Numbers by step, and one parameter of one element that moves from 1 to `end`."""
    numbers = {
        f"{kind}[{at}]": torch.tensor(loss(at), dtype=torch.float64) for kind in ("loss", "norm") for at in range(STEPS)
    }
    return numbers | {f"parameter:w@{STEPS}": torch.tensor([end], dtype=torch.float64)}


def charted(error: Callable[[int], float] = NEAR, spread: float = 0.01) -> Course:
    """Samples off by `error` at each step and by 1e-6 in the parameter, and seeds that differ by `spread`."""
    sample = training(lambda at: 1.0 + error(at), 2.0 + 1e-6)
    seeds = [training(always(1.0 + spread * (number - SEEDS // 2))) for number in range(SEEDS)]
    return chart(training(), {"w": torch.tensor([1.0], dtype=torch.float64)}, [sample], seeds)


def test_twice_the_distance_of_the_samples_is_allowed_and_no_more() -> None:
    assert not judge(training(always(1.0 + 1.9e-6)), charted()).faults
    assert judge(training(lambda at: 1.0 + 2.1e-6 * (at == 7)), charted()).faults


def test_the_worst_step_of_each_quantity_is_reported() -> None:
    figures = judge(training(lambda at: 1.0 + 1e-6 * (at == 7)), charted()).figures
    assert [figure.path for figure in figures if figure.view in {"loss", "norm"}] == ["loss[7]", "norm[7]"]


def test_a_parameter_is_judged_by_how_far_it_moved() -> None:
    truth = {"parameter:w@1": torch.tensor([1000.001], dtype=torch.float64)}
    start = {"w": torch.tensor([1000.0], dtype=torch.float64)}
    assert distance("parameter:w@1", torch.tensor([1000.0]), truth, start) == pytest.approx(1.0)


def test_samples_that_agree_by_chance_at_one_step_do_not_narrow_it() -> None:
    course = charted(lambda at: 0.0 if at == 7 else 1e-6)
    assert course.allowed["loss[7]"] == pytest.approx(2e-6)


def test_what_grows_late_allows_nothing_early() -> None:
    course = charted(lambda at: 1e-6 if at < 10 else 1e-3)
    assert course.allowed[f"loss[{9 - REACH}]"] == pytest.approx(2e-6)
    assert course.allowed["loss[10]"] == pytest.approx(2e-3)


def test_beyond_the_horizon_only_the_statistics_are_judged() -> None:
    course = charted(lambda at: 1e-6 if at < 10 else 1.0)
    assert course.horizons["loss"] == 10 - REACH
    assert not judge(training(lambda at: 1.0 + (0.02 * (-1) ** at if at >= 10 else 0.0)), course).faults
    (fault, other) = judge(training(lambda at: 1.0 + (0.5 if at >= 10 else 0.0)), course).faults
    assert (fault.path, fault.view) == (f"loss[{STEPS - LATE}:{STEPS}]", "mean loss of the training")
    assert (other.path, other.view) == (f"norm[{STEPS - LATE}:{STEPS}]", "mean norm of the training")


def test_a_problem_that_is_chaos_from_the_first_step_is_refused() -> None:
    with pytest.raises(ValueError, match="loss, norm: rounding errors decide"):
        charted(always(1.0))


def test_the_prediction_interval_has_students_quantile_of_the_tables() -> None:
    centre, half = trajectory._interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    assert centre == 5.0
    assert half == pytest.approx(5.041 * 7.5**0.5 * (10 / 9) ** 0.5, rel=1e-4)  # t of 8 degrees at 0.9995


def test_the_prediction_interval_holds_999_of_1000_trainings() -> None:
    generator = torch.Generator().manual_seed(0)
    missed = 0
    for _ in range(4000):
        values = torch.randn(SEEDS + 1, generator=generator, dtype=torch.float64)
        half = 5.041 * float(values[:SEEDS].std()) * (1 + 1 / SEEDS) ** 0.5
        missed += abs(float(values[SEEDS] - values[:SEEDS].mean())) > half
    assert 0 < missed <= 12  # 4 expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_fault_even_beyond_the_horizon(value: float) -> None:
    course = charted(lambda at: 1e-6 if at < 10 else 1.0)
    faults = judge(training(lambda at: value if at >= 15 else 1.0), course).faults
    assert [fault.path for fault in faults] == ["loss[15]", "norm[15]"]


def test_missing_unexpected_and_misshapen_tensors_are_faults() -> None:
    result = training()
    del result["loss[3]"]
    result["loss[99]"] = torch.zeros(())
    result["norm[0]"] = torch.zeros(2)
    faults = "\n".join(map(str, judge(result, charted()).faults))
    assert "loss[3]: missing" in faults
    assert "loss[99]: unexpected" in faults
    assert "norm[0]: shape: expected (), got (2,)" in faults


def test_only_what_is_asked_for_is_compared() -> None:
    judgement = judge({"loss[0]": torch.tensor(1.0)}, charted(), {"loss[0]"})
    assert (judgement.faults, judgement.compared) == ((), 1)


def test_paths_are_parsed() -> None:
    assert (quantity("norm[12]"), step("norm[12]")) == ("norm", 12)
    assert (quantity("parameter:a.b@8"), step("parameter:a.b@8")) == ("parameter", 7)
    with pytest.raises(ValueError, match="no path of a training"):
        step("out")


def test_the_second_asker_gets_what_the_first_one_made(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"tensor": torch.ones(2), "numbers": [1.5]}

    values = [Cache(tmp_path).once("key", make) for _ in range(2)]
    assert made == [1]
    assert all(torch.equal(value["tensor"], torch.ones(2)) for value in values)
    Cache(tmp_path).once("another", make)
    assert made == [1, 1]


def test_what_failed_is_not_kept(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Cache(tmp_path).once("key", fail)
    assert Cache(tmp_path).once("key", lambda: {"x": 1}) == {"x": 1}
