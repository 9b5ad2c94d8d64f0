"""Passes measured times to the fixture of pytest-benchmark, for its table, JSON, comparisons and histograms."""

from collections.abc import Sequence
from typing import Any

import pytest

from accelcheck.core.case import Case
from accelcheck.core.journal import Record


class Replay:
    """A timer that replays measured times: pytest-benchmark reads it twice per round."""

    def __init__(self) -> None:
        self._left: list[float] = []

    def load(self, times: Sequence[float]) -> None:
        """Sets the differences between the next pairs of readings, in seconds."""
        self._left = [moment for seconds in times for moment in (0.0, seconds)]

    def __call__(self) -> float:
        return self._left.pop(0) if self._left else 0.0


_REPLAY: pytest.StashKey[Replay] = pytest.StashKey()


def mark_timed(item: pytest.Item, case: Case) -> None:
    """Gives a test of a timed case the marker and the fixture of pytest-benchmark, before the test is set up."""
    replay = item.stash[_REPLAY] = Replay()
    item.add_marker(pytest.mark.benchmark(group=f"{case.workload}/{case.device}/{case.mode}", timer=replay))
    names: list[str] = getattr(item, "fixturenames", [])
    names.append("benchmark")


def hand_over(item: pytest.Item, record: Record) -> None:
    """Passes a record's times and figures to pytest-benchmark; does nothing without times or `mark_timed`."""
    replay = item.stash.get(_REPLAY, None)
    fixture: Any = getattr(item, "funcargs", {}).get("benchmark")
    if replay is None or fixture is None or not record.times:
        return
    replay.load(record.times)
    fixture.extra_info.update({m.name: m.value for m in record.measurements})
    fixture.pedantic(lambda: None, rounds=len(record.times), iterations=1)  # the work itself was timed before
