"""An experiment: a fast or small implementation beside a plain one, and the figures that compare them."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.core.units import duration, size
from accelcheck.experiments.claims.catalogue import Measured, What
from accelcheck.measure.clocks import block, settle
from accelcheck.measure.memory import measurable, peak
from accelcheck.measure.paired import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from accelcheck.devices.base import Device

LONG = 0.2
"""Seconds of a block that is long enough to warm up caches and clock rates by itself."""


@dataclass
class Side:
    """One of the two implementations.

    Attributes:
        call: Does the work once, and returns its result.
        clock: The device that it runs on, which times it.
        held: Bytes that exist before the call: parameters and inputs.
        ready: Frees memory that earlier calls left, before memory is measured.
    """

    call: Callable[[], object]
    clock: Device
    held: int = 0
    ready: Callable[[], object] = lambda: None


@dataclass
class Contest:
    """Both sides, right and ready.

    Attributes:
        plain: The implementation that the claim compares with.
        fast: The implementation that the claim is about.
        others: Figures that do not follow from the two calls alone, by quantity.
    """

    plain: Side
    fast: Side
    others: Mapping[What, Callable[[], Measured]] = field(default_factory=dict)


class Experiment(ABC):
    """Measures claims. Each module lists its `EXPERIMENTS`."""

    name: str
    """Name in the file of claims."""
    gives: frozenset[What]
    """Quantities that it measures."""

    def answer(self, device: Device) -> Capability:
        """Whether an open device has what the experiment is about."""
        return SUPPORTED

    @abstractmethod
    def contest(self, device: Device) -> AbstractContextManager[Contest]:
        """Both sides, after a check of the fast side's result.

        Raises:
            accelcheck.experiments.curve.WrongError: The result is wrong.
        """


def telling(device: Device, what: What) -> Capability:
    """Whether a device can measure such a figure."""
    return measurable(device) if what in {What.MEMORY, What.GROWTH} else SUPPORTED


def measured(contest: Contest, what: What, figure: float) -> Measured:
    """The figure of a contest, measured until its interval lies on one side of the claim, or until the last look.

    Raises:
        ClockError: As `accelcheck.measure.clocks` raises it.
    """
    if what in contest.others:
        return contest.others[what]()
    return _memory(contest) if what is What.MEMORY else _time(contest, what, figure)


def warm(timed: Callable[[], float]) -> None:
    """Warm up until times no longer fall; once, if a block is slow."""
    if timed() < LONG:
        settle(timed)


def _time(contest: Contest, what: What, figure: float) -> Measured:
    plain, fast = (block(side.clock, side.call) for side in (contest.plain, contest.fast))
    warm(plain)
    warm(fast)
    # Relative to the claimed time, so that measuring ends when the ratio is known to be below or above 1.
    owed = 1 / figure if what is What.SPEED_UP else 1 + figure
    found = compare(lambda: owed * plain(), fast)
    ratio, low, high = (owed * value for value in (found.ratio, found.low, found.high))
    how = (
        f"{duration(statistics.median(found.candidate))} against {duration(statistics.median(found.base) / owed)}, "
        f"{found.pairs} pairs"
    )
    if what is What.SPEED_UP:
        return Measured(1 / ratio, 1 / high, 1 / low, how)
    return Measured(ratio - 1, low - 1, high - 1, how)


def _memory(contest: Contest) -> Measured:
    sizes = []
    for side in (contest.fast, contest.plain):
        side.call()  # libraries have made their one-time allocations then
        side.ready()
        sizes.append(side.held + allocated(side.clock, side.call))
    fast, plain = sizes
    return Measured.exactly(1 - fast / plain, f"{size(fast)} against {size(plain)}")


def allocated(device: Device, call: Callable[[], object]) -> int:
    """Peak of the bytes that a call allocates.

    Raises:
        RuntimeError: The device has no memory statistics; see `telling`.
    """
    found = peak(device, call)
    if found.bytes is None:
        raise RuntimeError(f"expected the device's memory statistics, got none: {found.reason}")
    return found.bytes
