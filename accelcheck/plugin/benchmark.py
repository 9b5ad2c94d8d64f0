"""Hands what was timed to pytest-benchmark, through its public fixture: its table, JSON, comparisons and histograms show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record


class Replay:
    """A timer that tells times that were measured before: pytest-benchmark reads it twice a round."""

    def __init__(self) -> None:
        self._left: list[float] = []

    def load(self, times: Sequence[float]) -> None:
        """What the next readings are to differ by."""
        self._left = [moment for seconds in times for moment in (0.0, seconds)]

    def __call__(self) -> float:
        """The next moment, in seconds."""
        return self._left.pop(0) if self._left else 0.0


_REPLAY: pytest.StashKey[Replay] = pytest.StashKey()


def mark_timed(item: pytest.Item, case: Case) -> None:
    """Make a test that times a case one of pytest-benchmark's, before it is set up."""
    replay = item.stash[_REPLAY] = Replay()
    item.add_marker(pytest.mark.benchmark(group=f"{case.workload}/{case.device}/{case.mode}", timer=replay))
    names: list[str] = getattr(item, "fixturenames", [])
    names.append("benchmark")


def hand_over(item: pytest.Item, record: Record) -> None:
    """Give it the times of a record and its figures; nothing where the test was not announced, or nothing was timed."""
    replay = item.stash.get(_REPLAY, None)
    fixture: Any = getattr(item, "funcargs", {}).get("benchmark")
    if replay is None or fixture is None or not record.times:
        return
    replay.load(record.times)
    fixture.extra_info.update({m.name: m.value for m in record.measurements})
    fixture.pedantic(_nothing, rounds=len(record.times), iterations=1)


def _nothing() -> None:
    """What is called in place of the work that was timed before."""
