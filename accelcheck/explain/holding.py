"""Holds results to a budget: twice the errors of correct implementations, with more samples near the budget."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelcheck.verify.effort import CAREFUL, PROBE_SAMPLES
from accelcheck.verify.judge import Judgement, judge
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.views import SIGNED, VIEWS, Yardstick, budget

Sample = Callable[[int, torch.Generator], Mapping[str, Tensor]]

COUNTS = (PROBE_SAMPLES, *CAREFUL)
"""Numbers of samples; the later ones where a result exceeds its budget slightly, as for whole workloads."""
SEED = 1
"""Seed of the samples."""


class NoTruthError(RuntimeError):
    """Something cannot be computed in FP64, or has no budget; the message says why."""


def judged(
    own: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    precision: str,
    sample: Sample,
    *,
    eager: Mapping[str, Tensor] | None = None,
    careful: int = 0,
) -> tuple[Judgement, Reference]:
    """Judge results of one floating-point dtype, by path on the CPU, by the same in FP64 (`truth`).

    ``sample(number, generator)`` computes with one more correct implementation, in FP64. `eager` has results of another
    device, which widen a budget where the samples explain them. `careful` is the number of `COUNTS` left out. A
    `NoTruthError` where the precision is unknown.
    """
    if precision not in UNIT_ROUNDOFF:
        raise NoTruthError(f"no error budget is known for {precision}")
    unit, spacing = UNIT_ROUNDOFF[precision], SMALLEST_SUBNORMAL[precision]
    held = {path: in_range(truth[path], values.dtype) for path, values in own.items()}
    sticks = {path: Yardstick(values, unit, spacing) for path, values in held.items() if values.numel()}
    shown: dict[str, list[Any]] = {path: [] for path in sticks}
    generator = torch.Generator().manual_seed(SEED)
    done = 0
    for step, count in list(enumerate(COUNTS))[careful:]:
        for number in range(done, count):
            values = sample(number, generator)
            for path, stick in sticks.items():
                shown[path].append(stick.read(values[path]))
        done = count
        reference = _reference(held, sticks, shown, eager or {}, unit, spacing)
        judgement = judge(dict(own), reference)
        if step == len(COUNTS) - 1 or not judgement.near(step + 1, reference):
            break
    return judgement, reference


def _reference(
    held: dict[str, Tensor],
    sticks: dict[str, Yardstick],
    shown: dict[str, list[Any]],
    eager: Mapping[str, Tensor],
    unit: float,
    spacing: float,
) -> Reference:
    budgets = {
        path: {view: budget(view, [reading[view] for reading in readings], unit) for view in VIEWS}
        for path, readings in shown.items()
    }
    for path, tensor in eager.items():
        reading = sticks[path].read(tensor)
        for view in VIEWS:
            if abs(reading[view]) <= budgets[path][view]:
                budgets[path][view] = max(budgets[path][view], budget(view, [reading[view]], unit))
    leanings = {
        path: {view: tuple(reading[view] for reading in readings) for view in SIGNED}
        for path, readings in shown.items()
    }
    reference = Reference(held, {}, budgets, leanings, unit, spacing, 0.0)
    vars(reference)["sticks"] = sticks
    return reference


def in_range(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace values beyond the range of a dtype by infinity, their correct rounding."""
    rounded = truth.to(dtype)
    return torch.where(torch.isinf(rounded), rounded.to(torch.float64), truth)


def nearest(result: Tensor, truth: Tensor) -> bool:
    """True if every number is FP64's rounded to the dtype; two NaN are equal."""
    rounded = truth.to(result.dtype)
    if torch.equal(result, rounded):
        return True
    return torch.equal(result.isnan(), rounded.isnan()) and torch.equal(result.nan_to_num(), rounded.nan_to_num())


def named(dtype: torch.dtype) -> str:
    """Name of a dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")
