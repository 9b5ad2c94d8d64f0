"""Simulates how often each rule fails a correct result: ``python benchmarks/false_alarms.py``, about a minute.

The errors of the correct result and of the samples have one distribution: independent, uniform within a unit roundoff
of bfloat16. The code that judges cases reads each view. `first` is the probability that a view exceeds its budget from
so many samples, which prompts a closer look; `all`, that it still does after all looks, which fails the case. Where
fewer than `COUNTED` of the drawn results exceed, a normal distribution gives the probability: of log(measured /
allowed) for norms, of the ratio for single numbers. Closer looks hold single numbers to the quantile of Student's t for
`few.RARE`, which is then their probability; the script checks this for 1 in 1,000. The last line adds up a case of
`TENSORS` tensors and `DRAWS` draws. The exit status is 1 where that is above `LIMIT`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats

from accelcheck.verify import few, own
from accelcheck.verify.judge import CLOSE
from accelcheck.verify.precision import SLACK, UNIT_ROUNDOFF
from accelcheck.verify.views import SIGNED, VIEWS, Yardstick, floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.verify.views import Reading

COUNTS = (4, 5, 7, 33)
CAREFUL = (33, 129)
SHAPES = {"64 x 64": (64, 64), "20 x 10": (20, 10), "12 numbers": (12,)}
READINGS = 4000
DRAWN = 400_000
TRIALS = 300
COUNTED = 20
TENSORS, DRAWS = 20, 10
LIMIT = 1e-6
SMALLEST = 1e-12
"""Smallest probability that is printed."""
UNIT = UNIT_ROUNDOFF["bfloat16"]


def readings(shape: tuple[int, ...], generator: torch.Generator, count: int) -> tuple[Yardstick, list[Reading]]:
    """Correct results of one tensor, read."""
    truth = torch.randn(shape, generator=generator, dtype=torch.float64)
    stick = Yardstick(truth, UNIT)
    errors = (
        truth * UNIT * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) for _ in range(count)
    )
    return stick, [stick.read(truth + error) for error in errors]


def beyond(ratios: Any, factor: float = 1.0, *, single: bool = False) -> float:
    """Probability that measured / allowed is above a factor; of a single number, or of a norm."""
    ratios = ratios[ratios > 0.0]
    if not len(ratios):
        return 0.0
    counted = int((ratios > factor).sum())
    if counted >= COUNTED:
        return counted / len(ratios)
    if single:
        return 2 * float(stats.norm.sf(factor / math.sqrt(float((ratios**2).mean()))))
    logs = np.log(ratios)
    return float(stats.norm.sf((math.log(factor) - logs.mean()) / max(logs.std(), 1e-12)))


def of_view(view: str, values: Any, count: int, random: Any) -> Any:
    """Ratios of measured to allowed of drawn results, each held against so many drawn samples."""
    ratios = []
    for _ in range(max(1, DRAWN * count // 4_000_000)):
        some = min(DRAWN, 4_000_000 // count)
        samples = values[random.integers(len(values), size=(some, count))]
        allowed = np.maximum(SLACK * samples.max(1), floor(view, UNIT))
        ratios.append(values[random.integers(len(values), size=some)] / allowed)
    return np.concatenate(ratios)


def held(values: Any, random: Any) -> bool:
    """Returns True where at most 1.5 in 1,000 single numbers exceed the quantile for 1 in 1,000."""
    samples = values[random.integers(len(values), size=(DRAWN // 4, CAREFUL[0]))]
    quantile = float(stats.t.ppf(1 - 1e-3 / 2, CAREFUL[0])) * np.sqrt((samples**2).mean(1))
    return bool((values[random.integers(len(values), size=DRAWN // 4)] > quantile).mean() <= 1.5e-3)


def of_own(view: str, stick: Yardstick, read: Sequence[Reading], count: int, random: Any) -> Any:
    """Ratios as in `of_view`, of a view that is held against the samples' own errors."""
    ratios = []
    for _ in range(TRIALS):
        chosen = random.choice(len(read), count + 1, replace=False)
        result, *samples = (read[index].errors for index in chosen)
        known = own.noise([sample for sample in samples if sample is not None], stick.sizes, UNIT, 0.0)
        if known is not None and result is not None:
            measured, allowed = own.figures(result, known)[view]
            ratios.append(measured / allowed)
    return np.array(ratios)


def together(values: Any, count: int, random: Any) -> float:
    """Probability that the mean of four draws, which point one way, exceeds the budget of so many samples' means."""
    signed = values[random.integers(len(values), size=(DRAWN // 4, 4))]
    agree = (signed > 0).all(1) | (signed < 0).all(1)
    means = np.abs(values[random.integers(len(values), size=(DRAWN // 4, count, 4))].mean(2))
    return float(agree.mean()) * beyond(np.abs(signed.mean(1))[agree] / (SLACK * means.max(1))[agree], single=True)


def table(name: str, shape: tuple[int, ...], generator: torch.Generator, random: Any) -> float:
    """Print the rows of a tensor; returns the probability that any rule fails it in one draw."""
    stick, read = readings(shape, generator, READINGS)
    total = 0.0

    def line(view: str, first: Sequence[float], failed: float) -> None:
        cells = (f"{rate:.0e}" if rate >= SMALLEST else f"<{SMALLEST:.0e}" for rate in (*first, failed))
        print(f"| {view} | {name} | {' | '.join(cells)} |", flush=True)

    for view in (*VIEWS, *own.OWN):
        single = few.single(view, shape)
        if view == "bias" or (view in own.OWN and single):
            continue
        if view in own.OWN:
            ratios = {count: of_own(view, stick, read, count, random) for count in (*COUNTS, *CAREFUL)}
        else:
            values = np.abs([reading[view] for reading in read])
            ratios = {count: of_view(view, values, count, random) for count in (*COUNTS, *CAREFUL)}
            if single and not held(values, random):
                raise SystemExit(f"{view} of {name}: a single number is not held by the quantile of Student's t")
        # Beyond what is looked at again, or both budgets of more samples: the sum is no less than the probability.
        far = 0.0 if view in own.OWN else beyond(ratios[7], CLOSE[0])
        failed = few.RARE if single else far + beyond(ratios[CAREFUL[0]], CLOSE[1]) + beyond(ratios[CAREFUL[1]])
        line(f"`{view}`", [beyond(ratios[count], single=view in SIGNED) for count in COUNTS], failed)
        total += failed
    for view in sorted(SIGNED):
        values = np.array([reading[view] for reading in read])
        line(f"`{view}` in all draws", [together(values, count, random) for count in COUNTS], few.RARE_TOGETHER / 8)
        total += few.RARE_TOGETHER / 8 / DRAWS  # once a case, not once a draw
    return total


def main() -> int:
    generator, random = torch.Generator().manual_seed(0), np.random.default_rng(0)
    print(f"| view | tensor | {' | '.join(f'first, {count}' for count in COUNTS)} | all |")
    print(f"|---|---|{'---:|' * (len(COUNTS) + 1)}")
    totals = [table(name, shape, generator, random) for name, shape in SHAPES.items()]
    case = sum(totals) / len(totals) * TENSORS * DRAWS
    print(
        f"\nA case of {TENSORS} such tensors and {DRAWS} draws fails with a probability of {case:.1e} (limit "
        f"{LIMIT:g})."
    )
    return int(case > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
