"""Task accuracy: bounds cover, faults that cost accuracy fail, correct techniques pass, small samples are named."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import NormalDist, fmean, stdev
from typing import Any, cast

import pytest
import torch
from fault_harness import Bed, Planted, bench, built_in, case, erred, failed, passed, verdict_of
from torch import Tensor, nn

from accelcheck.checks import accuracy as check
from accelcheck.checks.accuracy import correct, learned
from accelcheck.core.capability import Code, unavailable
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.registry import discover, index
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import calling, kernels, nothing, replacing
from accelcheck.techniques.base import Technique
from accelcheck.verify.accuracy import CONFIDENCE, Pairs, fewest, learning_bound, pooled, replicated_bound, upper_bound
from accelcheck.verify.oracle import Store
from accelcheck.workloads import digits
from accelcheck.workloads.base import Program
from accelcheck.workloads.task import Task, deal

Z = NormalDist().inv_cdf(CONFIDENCE)
TECHNIQUES = index("technique", cast("list[Technique]", discover("accelcheck.techniques", "TECHNIQUES")))
ACCURACY, LEARNING = Mode.ACCURACY, Mode.LEARNING


def task(name: str) -> Task:
    chosen = built_in()[name]
    assert isinstance(chosen, Task)
    return chosen


def brief() -> Task:
    """The MLP's training, with one seed a fold: half the time."""
    return replace(task("digits-mlp-training"), seeds=3)


def shown(record: Record) -> dict[str, float]:
    return {figure.view: figure.measured for figure in record.figures}


@pytest.mark.parametrize(("lost", "won", "expected"), [(1, 0, 0.096), (0, 1, 0.037)])
def test_the_bound_is_tangos_for_his_own_example(lost: int, won: int, expected: float) -> None:
    # Tango 1998: 44 contact lens wearers, one discordant pair: the 90 % interval is (-0.096, 0.037), one end each way.
    assert upper_bound(Pairs(44, lost, won), 0.95) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("samples", [10, 381, 1797])
def test_without_discordant_pairs_the_bound_is_wilsons(samples: int) -> None:
    assert upper_bound(Pairs(samples, 0, 0)) == pytest.approx(Z**2 / (samples + Z**2), abs=1e-8)


def test_the_bound_solves_tangos_equation_where_both_directions_occur() -> None:
    # By hand, for b = 12, c = 5, n = 200: at the bound the likelihood's root and the score must agree.
    bound = upper_bound(Pairs(200, 12, 5))
    b = (2 * 200 - 12 + 5) * bound - 17
    likely = (math.sqrt(b * b + 8 * 200 * 5 * bound * (1 - bound)) - b) / 400 / 2
    score = (12 - 5 - 200 * bound) / math.sqrt(200 * (2 * likely + bound * (1 - bound)))
    assert score == pytest.approx(-Z, abs=1e-5)
    assert bound > 0.035


@pytest.mark.parametrize(
    ("samples", "lost", "won"), [(30, 0, 0), (50, 49, 1), (200, 12, 5), (1797, 0, 9), (1797, 40, 3)]
)
def test_a_drop_beyond_the_bound_is_rejected_and_one_within_is_not(samples: int, lost: int, won: int) -> None:
    """Tango's restricted maximum likelihood, here by a search over a grid of nuisance probabilities."""

    def score(drop: float) -> float:
        def likelihood(
            rate: float,
        ) -> float:  # of lost, won and neither, with probabilities rate + drop, rate and the rest
            parts = ((lost, rate + drop), (won, rate), (samples - lost - won, 1 - 2 * rate - drop))
            return sum(count * math.log(part) for count, part in parts if count)

        least, most = max(0.0, -drop), (1 - drop) / 2
        rates = (least + (most - least) * (step + 0.5) / 20_000 for step in range(20_000))
        rate = max(rates, key=likelihood)
        return (lost - won - samples * drop) / math.sqrt(samples * (2 * rate + drop * (1 - drop)))

    bound = upper_bound(Pairs(samples, lost, won))
    apart = 0.01 * (bound - (lost - won) / samples)
    assert score(bound - apart) > -Z > score(bound + apart)


def test_a_candidate_that_loses_more_has_a_larger_bound() -> None:
    bounds = [upper_bound(Pairs(500, lost, 4)) for lost in range(60)]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) == len(bounds)


def test_extremes_have_a_bound() -> None:
    assert upper_bound(Pairs(50, 50, 0)) == pytest.approx(1.0, abs=1e-6)
    assert -1.0 <= upper_bound(Pairs(50, 0, 50)) < -0.8
    with pytest.raises(ValueError, match="no sample"):
        upper_bound(Pairs(0, 0, 0))


@pytest.mark.parametrize("won", [0.0, 0.002, 0.01])
def test_a_technique_that_costs_the_limit_rarely_passes(won: float) -> None:
    """Coverage by simulation, in the place that decides: a true drop of just 1 %, with few discordant pairs."""
    draw = random.Random(7)
    samples, trials, passed = 1797, 1500, 0
    for _ in range(trials):
        lost_now = binomial(draw, samples, won + 0.01)
        won_now = binomial(draw, samples - lost_now, won / (1 - won - 0.01))
        passed += upper_bound(Pairs(samples, lost_now, won_now)) <= 0.01
    # 2.5 % of 1500 is 37.5, with a standard deviation of 6: the bound is neither too short nor needlessly long.
    assert 12 <= passed <= 56


def binomial(draw: random.Random, samples: int, rate: float) -> int:
    """By the gaps between successes, which are geometric: few draws where successes are few."""
    count, at = 0, 0
    while rate > 0.0:
        at += 1 + int(math.log(1.0 - draw.random()) / math.log1p(-rate))
        if at > samples:
            break
        count += 1
    return count


def test_the_bound_over_seeds_covers_where_seeds_differ_more_than_samples_say() -> None:
    draw = random.Random(11)
    trials = 600
    together = alone = 0
    for _ in range(trials):
        groups = []
        for _ in range(6):
            drop = 0.01 + draw.gauss(0.0, 0.008)  # a seed's own drop, whose mean is the limit
            rate = max(drop, 0.0) + 0.002
            groups.append(Pairs(599, binomial(draw, 599, rate), binomial(draw, 599, rate - drop)))
        together += learning_bound(groups) <= 0.01
        alone += upper_bound(pooled(groups)) <= 0.01
    assert together <= 0.04 * trials
    assert alone > 0.06 * trials  # what samples alone would say of seeds


def test_seeds_that_agree_by_chance_leave_the_samples_uncertainty() -> None:
    groups = [Pairs(599, 0, 0)] * 3
    assert replicated_bound([group.drop for group in groups]) == 0.0
    assert learning_bound(groups) == upper_bound(Pairs(1797, 0, 0)) > 0.0


def test_the_spread_over_seeds_counts() -> None:
    # Mean 0, standard deviation 10 / 600: 4.303 of sd / sqrt(3).
    groups = [Pairs(600, 10, 0), Pairs(600, 5, 5), Pairs(600, 0, 10)]
    assert replicated_bound([group.drop for group in groups]) == pytest.approx(4.303 / 60 / math.sqrt(3), rel=1e-3)
    assert learning_bound(groups) == replicated_bound([group.drop for group in groups]) > upper_bound(pooled(groups))
    with pytest.raises(ValueError, match="two seeds"):
        replicated_bound([0.0])


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (29, 2.045)]
)
def test_the_bound_over_seeds_has_students_quantiles_of_the_tables(freedom: int, quantile: float) -> None:
    count = freedom + 1
    drops = [0.01 * (-1) ** index for index in range(count)]
    scale = stdev(drops) / math.sqrt(count)
    assert replicated_bound(drops, 0.975) == pytest.approx(fmean(drops) + quantile * scale, abs=5e-4 * scale)


@pytest.mark.parametrize("limit", [0.001, 0.01, 0.05])
def test_the_fewest_samples_just_decide(limit: float) -> None:
    least = fewest(limit)
    assert upper_bound(Pairs(least, 0, 0)) <= limit < upper_bound(Pairs(least - 1, 0, 0))


def test_the_fewest_samples_for_one_percent_are_381() -> None:
    assert fewest(0.01) == 381  # 3.8415 * 99 = 380.3


@pytest.mark.parametrize("limit", [0.0, 1.0, -0.01, math.nan])
def test_a_limit_that_nothing_can_meet_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        fewest(limit)


def test_pairs_are_counted_sample_by_sample() -> None:
    assert Pairs.of([True, True, False, False, True], [True, False, True, False, False]) == Pairs(5, 2, 1)
    with pytest.raises(ValueError, match="zip"):
        Pairs.of([True], [])


def test_every_sample_is_held_out_once_and_never_learnt_from_then() -> None:
    chosen = task("digits-mlp")
    lessons = [chosen.lesson(0, fold) for fold in range(chosen.folds)]
    assert [len(lesson.inputs) for lesson in lessons] == [599, 599, 599]
    images, classes = digits.digits()
    rows = {tuple(row) for row in images.tolist()}
    assert len(rows) == len(images) == 1797  # so that a row tells its sample
    assert {tuple(row) for lesson in lessons for row in lesson.inputs.tolist()} == rows
    for lesson in lessons:
        assert not {tuple(row) for row in lesson.inputs.tolist()} & {tuple(row) for row in lesson.samples.tolist()}
        counts = lesson.target.bincount()
        assert bool(((counts * 3 - classes.bincount()).abs() <= 3).all()), "each class is dealt evenly"


def test_samples_are_dealt_evenly_when_they_do_not_divide() -> None:
    dealt = deal(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), 3)
    assert dealt.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_pixels_are_exact_in_every_dtype() -> None:
    images, _ = digits.digits()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(images.to(dtype).float(), images)
    assert float(images.min()) == -1.0
    assert float(images.max()) == 1.0


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "digits-vit", "digits-mlp-training"])
def test_a_seed_gives_one_problem(name: str) -> None:
    first, same, other = (task(name).problem(seed).module.state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "digits-vit"])
def test_traits_are_neither_false_nor_missing(name: str) -> None:
    chosen = task(name)
    module = chosen.problem(0).module
    kinds = [type(part) for part in module.modules()]
    assert ("linear" in chosen.traits) == (nn.Linear in kinds)
    assert ("conv" in chosen.traits) == (nn.Conv2d in kinds)
    assert ("batchnorm" in chosen.traits) == (nn.BatchNorm2d in kinds)
    assert ("blocks" in chosen.traits) == hasattr(module, "blocks")
    assert ("inplace" in chosen.traits) == any(hasattr(part, "inplace") for part in module.modules())
    assert chosen.traits | {"training"} == task(f"{name}-training").traits


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "digits-vit"])
def test_models_are_scriptable_as_their_traits_say(name: str) -> None:
    problem = task(name).problem(0)
    assert "scriptable" in task(name).traits
    few = problem.inputs[0][:5]
    module = problem.module.eval()
    torch.testing.assert_close(torch.jit.script(module)(few), module(few))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-mlp", "digits-cnn", "digits-vit"])
def test_float32_eager_learns_the_task(name: str, store: Store) -> None:
    chosen = task(name)
    seed = case(chosen, ACCURACY).seed
    right = torch.cat([learned(store.cache, chosen, seed + fold, fold).right for fold in range(3)])
    assert float(right.float().mean()) >= 0.965


def test_what_was_learnt_is_learnt_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = task("digits-mlp")
    first = learned(store.cache, chosen, 3, 1)
    monkeypatch.setattr("accelcheck.checks.accuracy._learn", None)
    again = learned(store.cache, chosen, 3, 1)
    assert torch.equal(first.logits, again.logits)
    assert all(torch.equal(first.state[key], again.state[key]) for key in first.state)


def test_a_logit_that_is_nan_is_never_right() -> None:
    logits = torch.tensor([[0.0, math.nan], [0.0, 1.0], [1.0, 0.0]])
    assert correct(logits, torch.tensor([1, 1, 1])).tolist() == [False, True, False]


@pytest.mark.parametrize(("folds", "seeds"), [(1, 2), (3, 4), (3, 0)])
def test_folds_and_seeds_that_weigh_samples_unevenly_are_refused(folds: int, seeds: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        replace(task("digits-mlp"), folds=folds, seeds=seeds)


@pytest.mark.parametrize(
    ("technique", "name"),
    [
        ("eager", "digits-mlp"),
        ("amp-bf16", "digits-mlp"),
        ("amp-bf16", "digits-cnn"),
        pytest.param("amp-bf16", "digits-vit", marks=pytest.mark.slow),
        ("channels-last", "digits-cnn"),
        ("view-transposed", "digits-mlp"),
        ("int8-dynamic", "digits-mlp"),
        pytest.param("int8-dynamic", "digits-vit", marks=pytest.mark.slow),
        ("int8-static", "digits-mlp"),
        ("int8-static", "digits-cnn"),
        pytest.param("jit-freeze", "digits-vit", marks=pytest.mark.slow),
    ],
)
def test_a_correct_technique_keeps_the_accuracy(technique: str, name: str, store: Store) -> None:
    device = Bed()
    device.features |= {"quantized-engine"}
    workload = task(name)
    record = bench(store, TECHNIQUES[technique], workload, device).run(case(workload, ACCURACY, technique=technique))
    assert record.verdict is Verdict.PASS, record.why
    assert record.compared == 1797
    assert shown(record)["before"] > 0.96


@pytest.mark.parametrize("technique", ["eager", "amp-bf16", pytest.param("grad-scaler-fp16", marks=pytest.mark.slow)])
def test_a_correct_technique_learns_as_well(technique: str, store: Store) -> None:
    record = passed(store, TECHNIQUES[technique], task("digits-mlp-training"), LEARNING)
    assert record.compared == 3594


def test_eager_learns_bit_for_bit_what_the_reference_learnt(store: Store) -> None:
    record = passed(store, Planted(nothing), brief(), LEARNING)
    assert shown(record)["lost"] == shown(record)["won"] == 0


def one_class_flipped(program: Program) -> None:
    with torch.no_grad():
        program.module.get_parameter("fc3.weight")[3].neg_()


def wrong_axis(program: Program) -> None:
    """int8 weights whose scales were taken by input channel and applied by output channel."""
    with torch.no_grad():
        weight = program.module.get_parameter("fc2.weight")
        by_input = weight.abs().amax(0) / 127.5
        integers = (weight / by_input).round().clamp(-128, 127)
        weight.copy_(integers * by_input[:, None])


def stale_weights(program: Program) -> None:
    """Parameters as they are at the first call, whatever they become."""
    held: dict[str, Tensor] = {}

    def call(module: nn.Module, x: Tensor) -> Tensor:
        if not held:
            held.update({name: p.detach().clone() for name, p in module.named_parameters()})
        used = {name: held[name] + 0.0 * p for name, p in module.named_parameters()}
        out: Tensor = torch.func.functional_call(module, used, (x,))
        return out

    calling(call)(program)


def cached_by_address(program: Program) -> None:
    seen: dict[int, Tensor] = {}

    def call(module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return seen.setdefault(x.data_ptr(), out)

    calling(call)(program)
    program.run(Mode.FORWARD)


def nan_rows(logits: Tensor) -> Tensor:
    return logits.index_fill(0, torch.arange(2), math.nan)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (one_class_flipped, "accuracy: view drop"),
        (wrong_axis, "accuracy: view drop"),
        (cached_by_address, "accuracy: view drop"),
        (replacing(out=torch.zeros_like), "accuracy: view drop"),
        (replacing(out=nan_rows), "out: NaN"),
        (replacing(out=lambda logits: logits[:-1]), "out: metadata"),
        (replacing(out=lambda logits: logits.long()), "out: metadata"),
    ],
    ids=["class-flipped", "int8-axis", "cached", "zeros", "nan", "short", "integers"],
)
def test_a_fault_that_costs_accuracy_fails(change: Change, line: str, store: Store) -> None:
    record = failed(store, Planted(change), task("digits-mlp"), ACCURACY)
    assert any(message.startswith(line) for message in record.why.splitlines()), record.why


def turned_gradients(func: Any, gradient: Tensor, *args: Any, **kwargs: Any) -> Any:
    """ReLU's gradient with the wrong sign."""
    return func(-gradient, *args, **kwargs)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "change", [stale_weights, kernels(threshold_backward=turned_gradients)], ids=["stale-weights", "gradient-sign"]
)
def test_a_training_that_goes_wrong_fails(change: Change, store: Store) -> None:
    record = failed(store, Planted(change), brief(), LEARNING)
    assert record.why.startswith("accuracy: view drop")


def test_the_message_says_what_was_lost_and_how_sure_that_is(store: Store) -> None:
    record = verdict_of(store, Planted(one_class_flipped), task("digits-mlp"), ACCURACY)
    figures = shown(record)
    assert "expected at most 1.000e-02 at 97.5% confidence" in record.why
    assert f"{figures['lost']:.0f} lost and {figures['won']:.0f} won of 1797 samples" in record.why
    assert figures["drop"] > figures["before"] - figures["after"] > 0.01


def test_the_limit_is_the_techniques_own(store: Store) -> None:
    lenient = Planted(one_class_flipped)
    lenient.accuracy_limit = 0.5
    record = passed(store, lenient, task("digits-mlp"), ACCURACY)
    assert next(f for f in record.figures if f.view == "drop").allowed == 0.5


def of_few(samples: int) -> Task:
    """The digits' first samples alone."""
    whole = task("digits-mlp")

    def make(generator: torch.Generator, extent: int) -> Any:
        problem = whole.make(generator, extent)
        assert problem.target is not None
        return replace(problem, inputs=(problem.inputs[0][:samples],), target=problem.target[:samples], steps=40)

    return replace(whole, name="digits-few", make=make, least=0.5)


def test_too_few_samples_is_said_and_never_passed(tmp_path: Any) -> None:
    record = erred(Store(tmp_path), Planted(nothing), of_few(300), ACCURACY)
    assert "UndecidedError: too few samples to decide: n = 300, at least 381 needed" in record.why


@pytest.mark.parametrize(("name", "mode"), [("digits-mlp", ACCURACY), ("digits-mlp-training", LEARNING)])
def test_a_stricter_limit_needs_more_samples_and_seeds_make_none(name: str, mode: Mode, store: Store) -> None:
    strict = Planted(nothing)
    strict.accuracy_limit = 0.002
    record = erred(store, strict, task(name), mode)
    assert "n = 1797, at least 1917 needed" in record.why


def test_a_reference_that_learnt_nothing_is_an_error(tmp_path: Any) -> None:
    whole = task("digits-mlp")
    lazy = replace(whole, make=partial(_untrained, whole.make))
    record = erred(Store(tmp_path), Planted(nothing), lazy, ACCURACY)
    assert "OracleError: digits-mlp: FP32 eager on the CPU reached an accuracy of" in record.why


def _untrained(make: Callable[[torch.Generator, int], Any], generator: torch.Generator, extent: int) -> Any:
    return replace(make(generator, extent), steps=1)


def test_an_absent_data_set_is_unavailable_with_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    record = verdict_of(store, Planted(nothing), task("digits-mlp"), ACCURACY)
    assert record.verdict is Verdict.UNAVAILABLE
    assert record.code == Code.NO_PACKAGE
    assert "pip install 'accelcheck[accuracy]'" in record.why


def test_a_task_says_itself_whether_its_data_is_here(store: Store) -> None:
    gone = replace(task("digits-mlp"), present=lambda: unavailable(Code.NO_PACKAGE, "no data"))
    assert verdict_of(store, Planted(nothing), gone, ACCURACY).verdict is Verdict.UNAVAILABLE


def test_a_workload_that_is_no_task_is_an_error(store: Store) -> None:
    record = erred(store, Planted(nothing), built_in()["mlp"], ACCURACY)
    assert "mode accuracy needs a workload of type Task; mlp is a Workload" in record.why


def test_a_technique_that_stops_in_a_later_fold_is_found(store: Store) -> None:
    class Once(Planted):
        folds = 0

        def evidence(self, *args: Any) -> Any:
            self.folds += 1
            for entry in super().evidence(*args):
                yield replace(entry, engaged=self.folds < 3)

    record = failed(store, Once(nothing), task("digits-mlp"), ACCURACY)
    assert record.why.startswith("not engaged")


def test_calibration_and_warm_up_see_no_held_out_sample(store: Store) -> None:
    given: list[Tensor] = []

    def change(program: Program) -> None:
        assert program.target is None
        given.append(program.inputs[0].clone())
        plain = program.run

        def run(mode: Mode) -> Any:
            given.append(program.inputs[0].clone())
            return plain(mode)

        program.run = run  # type: ignore[method-assign]  # on this instance alone

    assert verdict_of(store, Planted(change, warmups=1), task("digits-mlp"), ACCURACY).verdict is Verdict.PASS
    chosen = task("digits-mlp")
    for fold in range(3):
        calibration, warm_up, watched, judged = given[4 * fold : 4 * fold + 4]
        held = chosen.lesson(0, fold).inputs
        assert torch.equal(judged, held)
        rows = {tuple(row) for row in held.tolist()}
        assert not rows & {tuple(row) for row in [*calibration.tolist(), *warm_up.tolist(), *watched.tolist()]}
        assert not torch.equal(calibration, warm_up)


def test_watched_steps_are_fewer_than_those_of_a_training() -> None:
    assert 0 < check.WATCHED_STEPS < task("digits-mlp-training").problem(0).steps
