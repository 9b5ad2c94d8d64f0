"""pytest plugin that makes cases slower by a known part of their time, in timing processes of baseline_checks.py.

After each call of a candidate it waits for a part of the call's time. For devices whose calls return when they are
done.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.checks import speed
from accelcheck.core.case import TIMED, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VARIABLE = "PLANTED_SLOWDOWN"
"""Environment variable with the path of a JSON file: the part to add (0.05 for 5 %), by case id."""


def longer(call: Callable[[], object], part: float) -> Callable[[], object]:
    """The call, followed by waiting for `part` of its own time."""

    def slowed() -> object:
        start = time.perf_counter()
        held = call()
        now = time.perf_counter()
        end = now + part * (now - start)
        while time.perf_counter() < end:
            pass
        return held

    return slowed


def judged(case: str) -> str:
    """Id of a timed case while it runs, with the mode that it times."""
    head, _, mode = case.rpartition("/")
    return f"{head}/{TIMED[Mode(mode)]}"


def plant(parts: Mapping[str, float]) -> None:
    """Make these timed cases, by id, take so much longer."""
    by_judged = {judged(case): part for case, part in parts.items()}
    paired = speed._Measuring._paired  # noqa: SLF001 - where a candidate stands beside eager, whichever technique it is

    def planted(self: Any, base: Any, candidate: Any, *more: Any) -> Any:
        if part := by_judged.get(self.trial.case.id, 0.0):
            candidate.call = longer(candidate.call, part)
        return paired(self, base, candidate, *more)

    speed._Measuring._paired = planted  # type: ignore[assignment]  # noqa: SLF001 - a plant


def pytest_configure() -> None:
    """Plant what the file says."""
    plant(json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8")))
