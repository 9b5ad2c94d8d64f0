"""Estimates how long the rest of a run takes. No torch."""

from collections.abc import Iterable

from accelcheck.core.case import WEIGHTS, Mode

INTERVAL = 10.0
"""Least seconds between two lines."""
PART = 0.02
"""Least time between two lines, as a share of the run's estimated time, so that a long run writes about 50."""


class Progress:
    """Counts finished cases of these modes and estimates the time left; `start` is in seconds.

    A case's weight is the rough cost of its mode. The estimate is the time per weight of all finished cases: the latest
    ones alone would mislead, because cases of one slow technique follow each other.
    """

    def __init__(self, modes: Iterable[Mode], start: float) -> None:
        weights = [WEIGHTS.get(mode, 1) for mode in modes]
        self.total = len(weights)
        self._weight = sum(weights)
        self._start = self._spoken = self._now = start
        self._finished = 0
        self.done = 0

    def finish(self, mode: Mode, now: float) -> str | None:
        """Count a case that has finished at `now`, in seconds; the line that is due, if one is."""
        self._finished += WEIGHTS.get(mode, 1)
        self.done += 1
        self._now = now
        if self.done >= self.total:
            return None
        left = self.left()
        if now - self._spoken < max(INTERVAL, PART * (now - self._start + left)):
            return None
        self._spoken = now
        return f"{100 * self.done // self.total} % of {self.total:,} cases, about {rough(left)} left"

    def left(self) -> float:
        """Estimated seconds until all cases have finished; at least one has."""
        return (self._weight - self._finished) * (self._now - self._start) / self._finished


def rough(seconds: float) -> str:
    """Format an estimated time in the units that people use."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    tens = round(seconds / 10)
    if tens < 360:
        return f"{tens // 6} min" + (f" {tens % 6 * 10} s" if tens % 6 else "")
    minutes = round(seconds / 60)
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
