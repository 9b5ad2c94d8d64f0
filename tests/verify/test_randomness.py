"""Every planted fault of dropout is caught in every seed; correct dropout passes at the promised rate."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_harness import Planted, built_in, erred, failed, faults, passed, seeded, verdict_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults.plant import calling, nothing
from accelcheck.selftest.faults.random import dropped_weights
from accelcheck.verify import randomness
from accelcheck.verify.oracle import Store
from accelcheck.verify.randomness import Mask

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from accelcheck.core.case import Figure
    from accelcheck.core.journal import Record
    from accelcheck.workloads.base import Workload

    Draw = Callable[[Tensor, float], Tensor]

RANDOM = Mode.RANDOM
SEEDS = range(5)
DTYPES = ("float32", "bfloat16", "float16")


def half(number: int) -> Workload:
    """`dropout` of half as many elements, to save time, from a seed of its own."""
    workload = seeded("dropout", number)
    return replace(workload, make=lambda generator, extent: workload.make(generator, extent - 256))


def views(record: Record) -> set[str]:
    """The views that caught it, of any path."""
    assert record.verdict is Verdict.FAIL, (record.verdict, record.why)
    return {view.removeprefix("view ") for seen in faults(record).values() for view in seen}


# Draws: of values and a rate, where to keep. All but the first are faulty.
def fair(x: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(x.shape, generator=generator) >= rate


def more_often(x: Tensor, rate: float) -> Tensor:
    return fair(x, rate + 0.01)


def less_often(x: Tensor, rate: float) -> Tensor:
    return fair(x, rate - 0.01)


def unseeded(x: Tensor, rate: float) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return fair(x, rate, generator)


def one_for_all(x: Tensor, rate: float) -> Tensor:
    return fair(x, rate, torch.Generator().manual_seed(7))


def one_for_each_seed(x: Tensor, rate: float) -> Tensor:
    return fair(x, rate, torch.Generator().manual_seed(torch.initial_seed()))


def shifted_by_a_row(x: Tensor, rate: float) -> Tensor:
    """The stream of a seed, from a position that depends on the seed: neighbouring seeds give overlapping streams."""
    start = torch.initial_seed() % 100 * x.shape[1]
    stream = torch.rand(x.numel() + 100 * x.shape[1], generator=torch.Generator().manual_seed(7))
    return (stream[start : start + x.numel()] >= rate).view(x.shape)


def neighbours_share(x: Tensor, rate: float) -> Tensor:
    return fair(x[:, ::2], rate).repeat_interleave(2, dim=1)


def neighbours_lean(x: Tensor, rate: float) -> Tensor:
    kept = fair(x, rate)
    return torch.where(torch.rand(x.shape) < 0.05, kept.roll(1, dims=1), kept)


def rows_share(x: Tensor, rate: float) -> Tensor:
    return fair(x[:1], rate).expand(x.shape)


def two_rows_share(x: Tensor, rate: float) -> Tensor:
    kept = fair(x, rate)
    kept[200] = kept[3]
    return kept


def periodic(x: Tensor, rate: float) -> Tensor:
    kept = fair(torch.empty(1, 60000), rate)
    return kept.repeat(1, 1 + x.numel() // 60000).flatten()[: x.numel()].view(x.shape)


def tail_kept(x: Tensor, rate: float) -> Tensor:
    kept = fair(x, rate)
    kept[:, -1] = True
    return kept


def dropping(draw: Draw, scale: Callable[[float], float] = lambda rate: 1 / (1 - rate)) -> Callable[..., Any]:
    def call(module: Any, x: Tensor) -> Tensor:
        return x * draw(x, module.rate) * scale(module.rate) if module.training else x

    return call


def always(module: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, module.rate, training=True)


def scaled_in_evaluation(module: Any, x: Tensor) -> Tensor:
    """Dropout of the first papers: training keeps values as they are, evaluation scales by the probability."""
    return x * fair(x, module.rate) if module.training else x * (1 - module.rate)


class Forgetful(torch.autograd.Function):
    """Draws again going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float) -> Tensor:
        ctx.rate = rate
        return x * fair(x, rate) / (1 - rate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * fair(gradient, ctx.rate) / (1 - ctx.rate), None


def forgetful(module: Any, x: Tensor) -> Tensor:
    if not module.training:
        return x
    out: Tensor = Forgetful.apply(x, module.rate)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "not rescaled": (dropping(fair, lambda _rate: 1.0), "scale gain"),
    "scaled by the rate": (dropping(fair, lambda rate: 1 / rate), "scale gain"),
    "scaled for a rate one point more": (dropping(fair, lambda rate: 1 / (0.99 - rate)), "scale gain"),
    "rate one point more": (dropping(more_often), "rate"),
    "rate one point less": (dropping(less_often), "rate"),
    "unseeded": (dropping(unseeded), "same seed"),
    "one mask for all calls": (dropping(one_for_all), "likeness"),
    "one mask for each seed": (dropping(one_for_each_seed), "likeness"),
    "overlapping streams": (dropping(shifted_by_a_row), "likeness"),
    "neighbours share a draw": (dropping(neighbours_share), "lag"),
    "neighbours correlated by 5 %": (dropping(neighbours_lean), "lag"),
    "rows share a mask": (dropping(rows_share), "slices"),
    "two rows share a mask": (dropping(two_rows_share), "slices"),
    "a period of 60000": (dropping(periodic), "lag"),
    "the last column is kept": (dropping(tail_kept), "slice rate"),
    "active in evaluation": (always, "evaluation"),
    "scaled in evaluation": (scaled_in_evaluation, "evaluation"),
    "drawn again going back": (forgetful, "mask of the output"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_in_every_seed(name: str, fresh: Store) -> None:
    call, view = FAULTS[name]
    for number in SEEDS:
        assert view in views(verdict_of(fresh, Planted(calling(call)), half(number), RANDOM)), number


@pytest.mark.slow
def test_layers_that_share_a_mask_are_caught_in_every_seed(fresh: Store) -> None:
    def sharing(module: Any, x: Tensor) -> list[Tensor]:
        outs = [block.fc(x) + block.shift for block in module.blocks]
        kept = fair(outs[0], 0.1) / 0.9 if module.training else 1.0
        return [out * kept for out in outs]

    for number in SEEDS:
        record = verdict_of(fresh, Planted(calling(sharing)), seeded("dropout-blocks", number), RANDOM)
        assert views(record) == {"likeness"}


@pytest.mark.slow
def test_a_recomputation_with_another_mask_is_caught_in_every_seed(fresh: Store) -> None:
    def forgetting(module: Any, x: Tensor) -> list[Tensor]:
        return [checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) for block in module.blocks]

    for number in SEEDS:
        record = verdict_of(fresh, Planted(calling(forgetting)), seeded("dropout-blocks", number), RANDOM)
        assert views(record) == {"mask of the output"}


@pytest.mark.slow
def test_attention_that_drops_another_mask_in_the_gradient_is_caught(fresh: Store) -> None:
    def detached(module: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # The output shows one mask, its gradient comes from another.
        return module(q, k, v)[0], module(q, k, v)[1]

    record = verdict_of(fresh, Planted(calling(detached)), seeded("attention-dropout"), RANDOM)
    assert views(record) == {"mask of the output"}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dropout", "dropout-blocks", "attention-dropout"])
def test_eager_passes(name: str, dtype: str, fresh: Store) -> None:
    record = passed(fresh, Planted(nothing), seeded(name), RANDOM, dtype)
    assert record.compared > 500_000


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_correct_generator_passes_in_every_seed(dtype: str, fresh: Store) -> None:
    def own(module: Any, x: Tensor) -> Tensor:
        """Integers against a threshold, as fused kernels draw; the mask is multiplied by a rounded scale."""
        if not module.training:
            return x
        kept = torch.randint(0, 2**16, x.shape) >= round(module.rate * 2**16)
        scaled: Tensor = kept.to(x.dtype) / (1 - module.rate)
        return x * scaled

    for number in SEEDS:
        passed(fresh, Planted(calling(own)), half(number), RANDOM, dtype)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_unfused_attention_passes_though_it_rounds_its_weights_too(dtype: str, fresh: Store) -> None:
    """Fused attention, which eager runs, rounds once; in this seed unfused attention errs more than twice as much."""
    passed(fresh, Planted(dropped_weights()), seeded("attention-dropout", 2), RANDOM, dtype)


def test_a_lost_gradient_is_a_fault(fresh: Store) -> None:
    def cut(module: Any, x: Tensor) -> Tensor:
        return module(x.detach()).requires_grad_()  # type: ignore[no-any-return]  # a module gives anything

    record = failed(fresh, Planted(calling(cut)), half(0), RANDOM)
    assert record.why == "grad:input[0]: shape: expected (256, 512), got nothing"


def test_nan_is_no_wildcard(fresh: Store) -> None:
    def poisoned(module: Any, x: Tensor) -> Tensor:
        out: Tensor = module(x)
        return torch.where(torch.arange(out.shape[1]) == 5, torch.nan, out)

    assert {"scale", "evaluation"} <= views(verdict_of(fresh, Planted(calling(poisoned)), half(0), RANDOM))


def test_masks_that_cannot_be_judged_are_errors(tmp_path: Path) -> None:
    plain = half(0)
    tiny = replace(plain, make=lambda generator, _extent: built_in()["dropout"].make(generator, -500))

    def with_zeros(generator: torch.Generator, extent: int) -> Any:
        problem = plain.make(generator, extent)
        problem.inputs[0][3, 4] = 0.0
        return problem

    for workload, told in (
        (tiny, "give the workload larger inputs"),
        (replace(plain, make=with_zeros), "so close to 0"),
        (replace(plain, dropouts=()), "names no dropouts"),
        (replace(plain, dropouts=(replace(plain.dropouts[0], output="out[9]"),)), "no out[9] in its result"),
    ):
        folder = tmp_path / told  # one each: references are kept by the workload's name
        folder.mkdir()
        record = erred(Store(folder), Planted(nothing), workload, RANDOM)
        assert told in record.why


def test_random_workloads_say_what_they_drop() -> None:
    random = [workload for workload in built_in().values() if RANDOM in workload.modes]
    assert {workload.name for workload in random} == {
        "attention-dropout",
        "dropout",
        "dropout-blocks",
        "random-numbers",
    }
    assert all(workload.dropouts for workload in random)
    assert not any(w.dropouts for w in built_in().values() if RANDOM not in w.modes)


def draws(generator: torch.Generator, *shape: int, rate: float = 0.1) -> Mask:
    return Mask("out", torch.rand(shape, generator=generator) >= rate, rate)


STATISTICS: dict[str, Callable[[Mask, Mask, float], Figure]] = {
    "slice rates": lambda one, _other, alarm: randomness.slice_rates(one, alarm),
    "lags": lambda one, _other, alarm: randomness.lags(one, alarm),
    "slices": lambda one, _other, alarm: randomness.slices(one, alarm),
    "likeness": randomness.likeness,
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("name", STATISTICS)
def test_false_alarms_are_rarer_than_promised(name: str, rate: float) -> None:
    generator = torch.Generator().manual_seed(11)
    alarms = {1e-6: 0, 0.2: 0}
    for _ in range(700):  # 2100 masks for each statistic
        first, other = draws(generator, 12, 40, rate=rate), draws(generator, 12, 40, rate=rate)
        for alarm in alarms:
            alarms[alarm] += not STATISTICS[name](first, other, alarm).within
    assert alarms[1e-6] == 0
    assert alarms[0.2] <= 0.2 * 700


def test_the_rate_gives_no_false_alarm_in_2000_masks() -> None:
    generator = torch.Generator().manual_seed(12)
    assert all(randomness.rate(draws(generator, 32768), 1e-6).within for _ in range(2000))


def test_the_bound_holds_and_is_of_the_right_size() -> None:
    """Fewer than 1 % of 2000 sums of 5000 draws lie beyond the bound, some beyond half of it."""
    generator = torch.Generator().manual_seed(13)
    sums = (torch.rand(2000, 5000, generator=generator) < 0.1).double().sum(dim=1) - 500.0
    bound = float(randomness.deviation(0.01, 5000 * 0.09, 0.9))
    assert int((sums.abs() > bound).sum()) <= 20
    assert int((sums.abs() > bound / 2).sum()) >= 20


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64, 96, 97, 640, 4000])
def test_a_lag_is_found_where_it_is(lag: int) -> None:
    z = draws(torch.Generator().manual_seed(lag), 96 * 96).kept
    kept = z.clone()
    kept[lag:] = torch.where(torch.rand(len(z) - lag) < 0.4, z[:-lag], z[lag:])
    figure = randomness.lags(Mask("out", kept.view(96, 96), 0.1), 1e-9)
    assert not figure.within
    assert figure.where == f"lag {lag}"


@pytest.mark.parametrize("shift", [0, 1, -1, 300, -2000])
def test_a_shift_between_masks_is_found_where_it_is(shift: int) -> None:
    stream = draws(torch.Generator().manual_seed(3), 12000).kept
    first, other = stream[3000:9000], stream[3000 - shift : 9000 - shift]
    figure = randomness.likeness(Mask("a", first.view(60, 100), 0.1), Mask("b", other.view(60, 100), 0.1), 1e-9)
    assert not figure.within
    assert figure.where == f"shift {-shift}"


def test_masks_of_unlike_sizes_and_rates_can_be_compared() -> None:
    generator = torch.Generator().manual_seed(5)
    uniform = torch.rand(6000, generator=generator)
    first, other = Mask("a", uniform >= 0.1, 0.1), Mask("b", uniform[:5000] >= 0.25, 0.25)
    assert not randomness.likeness(first, other, 1e-9).within
    assert randomness.likeness(first, draws(generator, 50, 100, rate=0.25), 1e-9).within


@pytest.mark.parametrize(("axis", "where"), [(0, "[7, :, :] and [30, :, :]"), (2, "[:, :, 7] and [:, :, 30]")])
def test_slices_that_are_alike_are_named(axis: int, where: str) -> None:
    mask = draws(torch.Generator().manual_seed(6), 40, 12, 40)
    moved = mask.kept.movedim(axis, 0)
    moved[30] = moved[7]
    figure = randomness.slices(mask, 1e-9)
    assert not figure.within
    assert figure.where == where


def test_every_difference_counts_and_nan_equals_nan() -> None:
    ones = torch.tensor([1.0, torch.nan, 3.0, 4.0])
    other = torch.tensor([1.0, torch.nan, 5.0, torch.nan])
    assert randomness.difference("out", "same seed", ones, ones).within
    figure = randomness.difference("out", "same seed", ones, other)
    assert (figure.measured, figure.where) == (2.0, "[2]")
    told = torch.tensor([True, True, False, False])
    assert randomness.difference("out", "same seed", ones, other, told).within


@pytest.mark.parametrize(("rate", "other"), [*itertools.permutations([0.09, 0.1, 0.11], 2)])
def test_a_percentage_point_is_seen_in_a_mask_of_the_workloads_size(rate: float, other: float) -> None:
    mask = draws(torch.Generator().manual_seed(9), 256, 512, rate=rate)
    assert randomness.rate(mask, 1e-8).within
    assert not randomness.rate(replace(mask, rate=other), 1e-8).within
