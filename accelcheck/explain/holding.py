"""Results held to a budget, as the suite derives budgets: twice what correct implementations show, more of them where it is close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accelcheck.verify.effort import CAREFUL, PROBE_SAMPLES
from accelcheck.verify.judge import Judgement, judge
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.views import SIGNED, VIEWS, Yardstick, budget

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Sample = Callable[[int, torch.Generator], Mapping[str, Tensor]]

COUNTS = (PROBE_SAMPLES, *CAREFUL)
"""Numbers of samples: the further ones where a result exceeds its budget slightly, as for whole workloads."""
SEED = 1
"""Of the samples."""


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
    """Judge results of one dtype.

    Args:
        own: The results by path, on the CPU, of one floating-point dtype.
        truth: The same in FP64.
        precision: A key of `UNIT_ROUNDOFF`.
        sample: ``sample(number, generator)`` gives the results of one more correct implementation, in FP64.
        eager: Results of another device, which widen a budget where the samples explain them.
        careful: How many of `COUNTS` are left out.

    Raises:
        NoTruthError: The precision is unknown.
    """
    if precision not in UNIT_ROUNDOFF:
        raise NoTruthError(f"no error budget is known for {precision}")
    unit, spacing = UNIT_ROUNDOFF[precision], SMALLEST_SUBNORMAL[precision]
    held = {path: in_range(truth[path], one.dtype) for path, one in own.items()}
    sticks = {path: Yardstick(one, unit, spacing) for path, one in held.items() if one.numel()}
    shown: dict[str, list[Any]] = {path: [] for path in sticks}
    generator = torch.Generator().manual_seed(SEED)
    done = 0
    for step, count in list(enumerate(COUNTS))[careful:]:
        for number in range(done, count):
            one = sample(number, generator)
            for path, stick in sticks.items():
                shown[path].append(stick.read(one[path]))
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
    for path, one in eager.items():
        reading = sticks[path].read(one)
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
    """Infinite where a dtype has no such number: that is its correct rounding."""
    rounded = truth.to(dtype)
    return torch.where(torch.isinf(rounded), rounded.to(torch.float64), truth)


def nearest(one: Tensor, truth: Tensor) -> bool:
    """Whether every number is the one of its dtype that is nearest to FP64's; NaN is as NaN."""
    rounded = truth.to(one.dtype)
    if torch.equal(one, rounded):
        return True
    return torch.equal(one.isnan(), rounded.isnan()) and torch.equal(one.nan_to_num(), rounded.nan_to_num())


def named(dtype: torch.dtype) -> str:
    """As torch spells it, without its prefix."""
    return str(dtype).removeprefix("torch.")
