"""The smallest case: shapes and values of a wrong operator shrink while it still fails."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.explain import fused
from accelcheck.explain.calls import OperatorCall, aside, copied, memory
from accelcheck.verify.judge import judge_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accelcheck.core.case import Figure
    from accelcheck.explain.budgets import OperatorBudgets, OperatorFinding

SEED = 0
"""Of the values that replace those of the case."""
SECONDS = 10.0
"""That shrinking takes at most, beyond the step in progress."""
RUNS = 8
"""Calls in a row that show where errors point."""
STEPS = 64
"""Smaller cases that are tried at most."""


@dataclass(frozen=True)
class Smallest:
    """A wrong operator alone.

    Attributes:
        call: With its inputs, on the device.
        finding: What it shows.
        values: What its floating-point inputs are: ``ones``, ``normal`` (of `SEED`) or ``given``.
        steps: Number of smaller cases that were tried.
    """

    call: OperatorCall
    finding: OperatorFinding
    values: str
    steps: int


@dataclass(frozen=True)
class SmallestRuns:
    """A wrong operator alone, whose errors point one way in several calls.

    Attributes:
        call: Of the case; each call has other numbers in it, of the seeds 0 to `RUNS` - 1.
        figure: The mean that shows it, against its budget.
        precision: Of the operator: a key of `UNIT_ROUNDOFF`.
        values, steps: As of `Smallest`.
    """

    call: OperatorCall
    figure: Figure
    precision: str
    values: str = "normal"
    steps: int = 0


def smallest_runs(
    holder: OperatorBudgets, run: Callable[[OperatorCall], Any], call: OperatorCall, *, peers: bool = False
) -> SmallestRuns | None:
    """An operator called with other numbers, again and again; None where its errors do not point one way then.

    Args:
        holder: Knows the budgets.
        run: Runs a call where it failed, on its device.
        call: Of the case.
        peers: As of `OperatorBudgets.find`.
    """
    draws: dict[str, list[Any]] = {}
    for seed in range(RUNS):
        other = filled(call, "normal", seed)
        with aside():
            used = other.kept()
        try:
            finding = holder.find(other, used.results(run(used)), peers=peers)
        except Exception:  # noqa: BLE001 - numbers that an operator does not take raise anything
            return None
        for dtype, judgement in finding.judged.items():
            draws.setdefault(dtype, []).append((judgement.readings, finding.references[dtype]))
    for dtype, found in draws.items():
        beyond = [one for one in judge_together(found).figures if not one.within] if len(found) == RUNS else []
        if beyond:
            return SmallestRuns(call, max(beyond, key=lambda one: one.used), dtype)
    return None


class Shrinker:
    """Makes a call smaller while it fails.

    Args:
        holder: Knows the budgets.
        run: Runs a call where it failed, on its device.
        peers: As of `OperatorBudgets.find`.
        seconds: Most time, if less than `SECONDS`.
    """

    def __init__(
        self,
        holder: OperatorBudgets,
        run: Callable[[OperatorCall], Any],
        *,
        peers: bool = False,
        seconds: float = math.inf,
    ) -> None:
        self.holder, self.run, self.peers = holder, run, peers
        self._end = time.monotonic() + min(seconds, SECONDS)
        self._steps = 0
        self._poisons = False

    def shrink(self, call: OperatorCall) -> Smallest | None:
        """The smallest call that fails; None where this one does not fail when it is run again."""
        finding = self.failing(call)
        if finding is None:
            self._poisons = True  # what it does not write may be what the last call has left there
            finding = self.failing(call)
        if finding is None:
            return None
        values = "given"
        for size in sorted({size for one in call.tensors() for size in one.shape if size > 1}, reverse=True):
            call, finding = self._narrowed(call, finding, size)
        for smaller in self._simpler(call):
            if (again := self._tried(smaller[1])) is not None:
                values, call, finding = smaller[0], smaller[1], again
                break
        else:
            call, finding = self._dense(call, finding)
        return Smallest(call, finding, values, self._steps)

    def failing(self, call: OperatorCall) -> OperatorFinding | None:
        """What a call shows where it is wrong; None where it is right, or cannot be run or judged."""
        with aside():
            before, used, other = call.kept(), call.kept(), call.kept()
        try:
            if self._poisons:
                _poison(other.results(self.run(other)).values())
            finding = self.holder.find(before, used.results(self.run(used)), peers=self.peers)
        except Exception:  # noqa: BLE001 - sizes that do not fit raise anything
            return None
        return finding if finding.faults else None

    def _tried(self, call: OperatorCall) -> OperatorFinding | None:
        if self._steps >= STEPS or time.monotonic() > self._end:
            return None
        self._steps += 1
        return self.failing(call)

    def _narrowed(
        self, call: OperatorCall, finding: OperatorFinding, size: int
    ) -> tuple[OperatorCall, OperatorFinding]:
        """With every dimension of one size shorter: 1, else half as often as it fails, else as short as one after the other shows."""
        low, high = 0, size  # fails with `high`, not with `low`
        # Attention that loses a key of one divides by 0 in torch's own kernel, and ends the process.
        for wanted in (2,) if fused.fused_attention(call) else (1, 2):
            for tail in (False, True) if wanted < high else ():
                smaller = resized(call, size, wanted, tail=tail)
                if (again := self._tried(smaller)) is not None:
                    return smaller, again
            low = wanted
        best = call
        while high - low > 1:
            middle = (low + high) // 2
            smaller = resized(call, size, middle)
            again = self._tried(smaller)
            if again is None:
                low = middle
            else:
                high, best, finding = middle, smaller, again
        return best, finding

    def _simpler(self, call: OperatorCall) -> Iterator[tuple[str, OperatorCall]]:
        for values in ("ones", "normal"):
            yield values, filled(call, values)

    def _dense(self, call: OperatorCall, finding: OperatorFinding) -> tuple[OperatorCall, OperatorFinding]:
        dense = call.each(lambda one: one.contiguous().clone() if isinstance(one, Tensor) else one)
        again = None if all(one.is_contiguous() for one in call.tensors()) else self._tried(dense)
        return (call, finding) if again is None else (dense, again)


def _poison(results: Iterable[Tensor]) -> None:
    """Allocate such memory, fill it, and release it: a result that is not written has these numbers then."""
    with aside():
        held = [torch.full_like(one, torch.nan) for one in results for _ in range(2) if one.is_floating_point()]
        del held


def resized(call: OperatorCall, old: int, new: int, *, tail: bool = False) -> OperatorCall:
    """The call with all dimensions of one size cut to another, to their end with `tail`, and the numbers in lists that name it."""
    with aside():
        smaller = call.each(lambda one: cut(one, old, new, tail=tail) if isinstance(one, Tensor) else one)
    args = tuple(listed(one, old, new) for one in smaller.args)
    return OperatorCall(call.func, args, {name: listed(one, old, new) for name, one in smaller.kwargs.items()})


def cut(one: Tensor, old: int, new: int, *, tail: bool = False) -> Tensor:
    """A tensor with all dimensions of one size cut to another, to their end with `tail`."""
    whole = one
    for dim, size in enumerate(whole.shape):
        if size == old:
            one = one.narrow(dim, old - new if tail else 0, new)
    return one.contiguous().clone() if whole.is_contiguous() else one


def listed(one: Any, old: int, new: int) -> Any:
    """A list of numbers with one of them in place of another; anything else as it is."""
    if isinstance(one, (list, tuple)) and one and all(isinstance(number, int) for number in one):
        return [new if number == old and not isinstance(number, bool) else number for number in one]
    return one


def filled(call: OperatorCall, values: str, seed: int = SEED) -> OperatorCall:
    """The call with other values in its floating-point tensors: ``ones``, or ``normal`` numbers of a seed, in the order of the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def change(one: Any) -> Any:
        floating = isinstance(one, Tensor) and one.is_floating_point()
        return filled_tensor(one, values, generator) if floating else one

    return call.each(change)


def filled_tensor(one: Tensor, values: str, generator: torch.Generator) -> Tensor:
    """A tensor like another one, of ``ones`` or of the generator's ``normal`` numbers."""
    with aside():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            other = copied(one)
            held = memory(other)
            held.copy_(torch.ones(held.shape) if values == "ones" else torch.randn(held.shape, generator=generator))
            return other
        finally:
            torch.set_default_dtype(before)
