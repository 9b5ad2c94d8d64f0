"""How far a run is, and how long the rest of it takes. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.case import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERVAL = 10.0
"""Seconds between two lines, at least."""
PART = 0.02
"""Of the whole run's estimated time: the least between two lines, so that a long run writes about 50."""
WEIGHTS = {Mode.TRAJECTORY: 20, Mode.LEARNING: 20, Mode.SPEED: 20, Mode.TRAIN_SPEED: 20}
"""Cost of a case by its mode; 1 of the others."""
RECENT = 20
"""Cases that count as the last ones."""


class Progress:
    """Counts finished cases and estimates the time left.

    A case has a weight, which is what cases of its mode cost, roughly. Half of the estimate is the time per weight of all
    finished cases, half that of the last ones: costs change with the technique.

    Args:
        modes: Of the cases of the run.
        start: When the first one began, in seconds.
    """

    def __init__(self, modes: Iterable[Mode], start: float) -> None:
        weights = [_weight(mode) for mode in modes]
        self.total = len(weights)
        self._weight = sum(weights)
        self._finished = [(start, 0)]
        self._spoken = start

    @property
    def done(self) -> int:
        """Finished cases."""
        return len(self._finished) - 1

    def finish(self, mode: Mode, now: float) -> str | None:
        """Count a case that has finished.

        Args:
            mode: Of the case.
            now: In seconds.

        Returns:
            The line that is due, if one is.
        """
        self._finished.append((now, self._finished[-1][1] + _weight(mode)))
        if self.done >= self.total:
            return None
        left = self.left()
        if now - self._spoken < max(INTERVAL, PART * (now - self._finished[0][0] + left)):
            return None
        self._spoken = now
        return f"{100 * self.done // self.total} % of {self.total:,} cases, about {rough(left)} left"

    def left(self) -> float:
        """Estimated seconds until all cases have finished; at least one has."""
        last, weight = self._finished[-1]
        since = (self._finished[0], self._finished[-1 - min(RECENT, self.done)])
        each = [(last - start) / (weight - before) for start, before in since]
        return (self._weight - weight) * sum(each) / len(each)


def _weight(mode: Mode) -> int:
    return WEIGHTS.get(mode, 1)


def rough(seconds: float) -> str:
    """A time that is an estimate, in the units that people use."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    tens = round(seconds / 10)
    if tens < 360:
        return f"{tens // 6} min" + (f" {tens % 6 * 10} s" if tens % 6 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
