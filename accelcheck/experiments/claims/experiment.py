"""Experiments: a fast or small implementation beside a plain one, and figures that compare them."""

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
"""Duration in seconds of a block that warms up caches and clock rates by itself."""


@dataclass
class Side:
    """One of the two implementations: a call does the work once, on the device whose clock times it.

    `held` are the bytes of parameters and inputs; `ready` frees memory of earlier calls, before memory is measured.
    """

    call: Callable[[], object]
    clock: Device
    held: int = 0
    ready: Callable[[], object] = lambda: None


@dataclass
class Contest:
    """Both sides, right and ready: `fast` is what the claim is about, and `plain` what it compares with.

    `others` are functions that measure figures other than time and memory of the calls, by quantity.
    """

    plain: Side
    fast: Side
    others: Mapping[What, Callable[[], Measured]] = field(default_factory=dict)


class Experiment(ABC):
    """Base of the experiments that measure claims; each module lists its `EXPERIMENTS`."""

    name: str
    """Name in the file of claims."""
    gives: frozenset[What]
    """Quantities that it measures."""

    def answer(self, device: Device) -> Capability:
        """Capability of an open device to run the experiment."""
        return SUPPORTED

    @abstractmethod
    def contest(self, device: Device) -> AbstractContextManager[Contest]:
        """Give both sides, after a check of the fast side's result; raises `WrongError` where it is wrong."""


def telling(device: Device, what: What) -> Capability:
    """Capability of a device to measure a quantity."""
    return measurable(device) if what in {What.MEMORY, What.GROWTH} else SUPPORTED


def measured(contest: Contest, what: What, figure: float) -> Measured:
    """Measure a contest until the interval lies on one side of the claimed figure, or until the last look."""
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
    comparison = compare(lambda: owed * plain(), fast)
    ratio, low, high = (owed * value for value in (comparison.ratio, comparison.low, comparison.high))
    seconds, base = statistics.median(comparison.candidate), statistics.median(comparison.base) / owed
    how = f"{duration(seconds)} against {duration(base)}, {comparison.pairs} pairs"
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
    """Peak of the bytes that a call allocates, on a device with memory statistics; see `telling`."""
    memory = peak(device, call)
    if memory.bytes is None:
        raise RuntimeError(f"expected the device's memory statistics, got none: {memory.reason}")
    return memory.bytes
