"""An experiment: something fast or small beside something plain, and the figures that both give."""

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
"""Seconds of a block from which on one is warm-up enough: it fills caches and raises clocks itself."""


@dataclass
class Side:
    """One of the two.

    Attributes:
        call: Does the work once, and gives its result.
        clock: The device that it runs on, by which it is timed.
        held: Bytes that it needs before it is called: parameters, inputs.
        ready: Frees what an earlier call has left, before memory is measured.
    """

    call: Callable[[], object]
    clock: Device
    held: int = 0
    ready: Callable[[], object] = lambda: None


@dataclass
class Contest:
    """Both sides, right and ready.

    Attributes:
        plain: What articles compare with.
        fast: What they praise.
        others: Figures that do not come from the two calls alone, by what they are of.
    """

    plain: Side
    fast: Side
    others: Mapping[What, Callable[[], Measured]] = field(default_factory=dict)


class Experiment(ABC):
    """What measures claims. One file a family; each lists its `EXPERIMENTS`."""

    name: str
    """Its word in the file of claims."""
    gives: frozenset[What]
    """Of what it has a figure."""

    def answer(self, device: Device) -> Capability:
        """Whether what it is about exists on an open device."""
        del device
        return SUPPORTED

    @abstractmethod
    def contest(self, device: Device) -> AbstractContextManager[Contest]:
        """Both sides, after a look at the result of the fast one.

        Raises:
            accelcheck.experiments.curve.WrongError: It is not right.
        """


def telling(device: Device, what: What) -> Capability:
    """Whether a device tells what such a figure needs."""
    return measurable(device) if what in {What.MEMORY, What.GROWTH} else SUPPORTED


def measured(contest: Contest, what: What, figure: float) -> Measured:
    """The figure of a contest, measured until it is known on which side of a claim's it lies, or looks are over.

    Raises:
        ClockError: As `accelcheck.measure.clocks` raises it.
    """
    if what in contest.others:
        return contest.others[what]()
    return _memory(contest) if what is What.MEMORY else _time(contest, what, figure)


def warm(timed: Callable[[], float]) -> None:
    """Until times no longer fall; of what is slow, once."""
    if timed() < LONG:
        settle(timed)


def _time(contest: Contest, what: What, figure: float) -> Measured:
    plain, fast = (block(side.clock, side.call) for side in (contest.plain, contest.fast))
    warm(plain)
    warm(fast)
    # As a part of what the claim owes: then the question is whether it is below 1, and measuring ends when that is known.
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
        side.call()  # what is allocated once, by libraries, is there then
        side.ready()
        sizes.append(side.held + allocated(side.clock, side.call))
    fast, plain = sizes
    return Measured.exactly(1 - fast / plain, f"{size(fast)} against {size(plain)}")


def allocated(device: Device, call: Callable[[], object]) -> int:
    """Bytes that a call allocates at most at once.

    Raises:
        RuntimeError: The device does not tell; see `telling`.
    """
    found = peak(device, call)
    if found.bytes is None:
        raise RuntimeError(f"expected a peak of memory from a device that tells it, got none: {found.reason}")
    return found.bytes
