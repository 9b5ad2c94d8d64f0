"""The smallest case: shapes and values of a wrong operator shrink while it still fails."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Figure
from accelcheck.explain import fused
from accelcheck.explain.budgets import OperatorBudgets, OperatorFinding
from accelcheck.explain.calls import OperatorCall, aside, copied, memory
from accelcheck.verify.judge import judge_together

SEED = 0
"""Seed of the values that replace those of the case."""
SECONDS = 10.0
"""Most seconds for shrinking, beyond the step in progress."""
RUNS = 8
"""Number of calls in a row that show where errors point."""
STEPS = 64
"""Most smaller cases tried."""


@dataclass(frozen=True)
class Smallest:
    """A wrong operator alone: its call on the device, and the judgement of its results; `steps` counts smaller tries.

    `values` is the kind of its floating-point inputs: ``ones``, ``normal`` (of `SEED`) or ``given``.
    """

    call: OperatorCall
    finding: OperatorFinding
    values: str
    steps: int


@dataclass(frozen=True)
class SmallestRuns:
    """A wrong operator alone, whose errors point one way in several calls.

    Attributes:
        call: Call of the case; each further call has other numbers, of the seeds 0 to `RUNS` - 1.
        figure: Mean that shows the fault, against its budget.
        precision: Precision of the operator, a key of `UNIT_ROUNDOFF`.
        values, steps: The same as in `Smallest`.
    """

    call: OperatorCall
    figure: Figure
    precision: str
    values: str = "normal"
    steps: int = 0


def smallest_runs(
    holder: OperatorBudgets, run: Callable[[OperatorCall], Any], call: OperatorCall, *, peers: bool = False
) -> SmallestRuns | None:
    """Call an operator with other numbers, again and again; None where its errors do not point one way then.

    `run` runs a call where it failed, on its device, and `peers` is the same as for `OperatorBudgets.find`.
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
    for dtype, readings in draws.items():
        figures = judge_together(readings).figures if len(readings) == RUNS else ()
        beyond = [figure for figure in figures if not figure.within]
        if beyond:
            return SmallestRuns(call, max(beyond, key=lambda figure: figure.used), dtype)
    return None


class Shrinker:
    """Makes a call smaller while it fails, for at most `SECONDS`; the arguments are those of `smallest_runs`."""

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
        """Find the smallest call that fails; None where this one is right when it is run again."""
        finding = self.failing(call)
        if finding is None:
            self._poisons = True  # results that it does not write may be left from the last call
            finding = self.failing(call)
        if finding is None:
            return None
        values = "given"
        for size in sorted({size for tensor in call.tensors() for size in tensor.shape if size > 1}, reverse=True):
            call, finding = self._narrowed(call, finding, size)
        for kind in ("ones", "normal"):
            simpler = filled(call, kind)
            if (again := self._tried(simpler)) is not None:
                values, call, finding = kind, simpler, again
                break
        else:
            call, finding = self._dense(call, finding)
        return Smallest(call, finding, values, self._steps)

    def failing(self, call: OperatorCall) -> OperatorFinding | None:
        """Judge a call; None where it is right, or cannot be run or judged."""
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
        """Shorten every dimension of one size: to 1 or 2, else by bisection."""
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

    def _dense(self, call: OperatorCall, finding: OperatorFinding) -> tuple[OperatorCall, OperatorFinding]:
        dense = call.each(lambda value: value.contiguous().clone() if isinstance(value, Tensor) else value)
        again = None if all(value.is_contiguous() for value in call.tensors()) else self._tried(dense)
        return (call, finding) if again is None else (dense, again)


def _poison(results: Iterable[Tensor]) -> None:
    """Allocate such memory, fill it with NaN, and release it: a result that is not written shows them."""
    with aside():
        held = [torch.full_like(x, torch.nan) for x in results for _ in range(2) if x.is_floating_point()]
        del held


def resized(call: OperatorCall, old: int, new: int, *, tail: bool = False) -> OperatorCall:
    """Cut all dimensions of one size to another, to their end with `tail`; and change such numbers in lists."""
    with aside():
        smaller = call.each(lambda value: cut(value, old, new, tail=tail) if isinstance(value, Tensor) else value)
    args = tuple(listed(value, old, new) for value in smaller.args)
    return OperatorCall(call.func, args, {name: listed(value, old, new) for name, value in smaller.kwargs.items()})


def cut(tensor: Tensor, old: int, new: int, *, tail: bool = False) -> Tensor:
    """Cut all dimensions of one size to another, to their end with `tail`."""
    whole = tensor
    for dim, size in enumerate(whole.shape):
        if size == old:
            tensor = tensor.narrow(dim, old - new if tail else 0, new)
    return tensor.contiguous().clone() if whole.is_contiguous() else tensor


def listed(value: Any, old: int, new: int) -> Any:
    """Replace one number by another in a list; anything else stays as it is."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(number, int) for number in value):
        return [new if number == old and not isinstance(number, bool) else number for number in value]
    return value


def filled(call: OperatorCall, values: str, seed: int = SEED) -> OperatorCall:
    """Fill a call's floating-point tensors, in order, with ``ones`` or with ``normal`` numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)

    def change(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return filled_tensor(value, values, generator) if floating else value

    return call.each(change)


def filled_tensor(tensor: Tensor, values: str, generator: torch.Generator) -> Tensor:
    """Make a tensor like another one, of ``ones`` or of the generator's ``normal`` numbers."""
    with aside():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            other = copied(tensor)
            held = memory(other)
            held.copy_(torch.ones(held.shape) if values == "ones" else torch.randn(held.shape, generator=generator))
            return other
        finally:
            torch.set_default_dtype(before)
