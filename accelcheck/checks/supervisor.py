"""Runs cases in a process of their own: one that crashes, hangs or loses its device ends that process, and nothing else.

The process is a fork from before the first case, so that it knows every technique and device that was registered here, by whatever
way. When it ends, another fork takes its place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Verdict
from accelcheck.core.clean_process import CleanProcess, CleanProcessError
from accelcheck.core.journal import Record
from accelcheck.core.plain import text
from accelcheck.core.words import seconds_of
from accelcheck.verify.cache import compute

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.core.case import Case

BEGIN = 120.0
"""Seconds that a process has to begin: it imports nothing, but makes a clean process of its own."""

_FIND: list[Callable[[Case], Record]] = []
"""What runs a case, in the process that runs them."""


class Supervisor:
    """Runs cases in another process.

    Args:
        make: Makes what runs a case and gives its record; called in the process that runs them, before the first one.
        seconds: That a case may take; None for `seconds_of` it, by its level and technique; 0 for no limit.

    Raises:
        CleanProcessError: A fork of this process cannot compute.
    """

    def __init__(self, make: Callable[[], Callable[[Case], Record]], seconds: float | None = None) -> None:
        self._make = make
        self._seconds = seconds
        self._process = self._new()

    def _new(self) -> CleanProcess:
        def begin() -> None:
            _FIND[:] = [self._make()]
            if torch.get_num_threads() > 1:
                compute()  # a fork that hangs here is not used

        return CleanProcess([], ((begin, BEGIN),))

    def run(self, case: Case, patience: float = 1.0) -> Record:
        """The record of a case, before the ledger is asked.

        Args:
            case: To run.
            patience: Of its technique.
        """
        if self._process.gone:  # no case has run in this process: a fork of it is as good as the first one
            self._process.close()
            try:
                self._process = self._new()
            except CleanProcessError as error:
                return Record(case, Verdict.ERROR, reason=str(error))
        limit = seconds_of(case.level, patience) if self._seconds is None else self._seconds
        try:
            record = Record.from_json(json.loads(self._process.call(_record, case, limit=limit or None)))
        except CleanProcessError as error:
            if self._process.gone:
                return Record(
                    case, Verdict.CRASH, reason="the process that ran it is gone, and so is the one that starts it"
                )
            if error.end is None:
                return Record(case, Verdict.ERROR, reason=str(error))
            return Record(
                case,
                error.end.verdict,
                code=error.end.how,
                reason=f"the process that ran it {error.end}",
                traceback=error.printed,
            )
        if record.verdict is Verdict.DEVICE_LOST:
            self.renew()  # what has lost its device in one process may find it again in the next
        return record

    def renew(self) -> None:
        """Have the next case run in another process."""
        self._process.renew()

    def printed(self) -> str:
        """What the last case has printed."""
        return self._process.printed()

    def close(self) -> None:
        """End the process."""
        self._process.close()


def _record(case: Case) -> str:
    return recorded(_FIND[0], case)


def recorded(find: Callable[[Case], Record], case: Case) -> str:
    """The record of a case as JSON, whatever the case raises: for another process."""
    try:
        record = find(case)
    except BaseException as error:  # noqa: BLE001 - `sys.exit`, `pytest.skip`, an interrupt: raised there, it would end the run
        record = Record(case, Verdict.ERROR, reason=f"{type(error).__name__}: {text(error)}")
    # As JSON: a record may hold what cannot be unpickled in the other process.
    return json.dumps(record.as_json())
