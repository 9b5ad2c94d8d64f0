"""The supervisor in pytest's process: runs cases in another process, and applies baselines, limits and ledgers.

A case that crashes, hangs or loses its device ends the process of the cases, and nothing else. That process is a fork
of pytest's from before the first case, so it knows every registered technique and device. When it ends, another fork
takes its place.
"""

import importlib
import json
from dataclasses import replace

from accelcheck.checks.execute import Bench, recorded
from accelcheck.core.case import Case, Verdict, seconds_of
from accelcheck.core.clean_process import CleanProcess, CleanProcessError
from accelcheck.core.journal import Record
from accelcheck.expectations.ledger import Ledger, hold
from accelcheck.measure.gate import Gate

BEGIN = 120.0
"""Time limit in seconds for a process to begin: it imports nothing, but forks a clean process of its own."""
AGAIN = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST})
"""Verdicts of cases that run again in another process."""
RUNS = 3
"""Most runs of such a case: two, and a third if they differ, for a rough rate."""


class Supervisor:
    """Makes the records of cases for the journal, by a `bench` that is used in the process of the cases.

    Args:
        bench: Runner of cases.
        ledger: Known failures.
        gate: Baselines and limits that measurements are compared with; None where neither was asked for.
        seconds: Time limit of a case; 0 for none; None for `seconds_of`, by its level and technique.
        here: True to run cases in this process, which a crash or hang then ends.

    Raises:
        CleanProcessError: A fork of this process cannot compute.
    """

    def __init__(
        self,
        bench: Bench,
        ledger: Ledger,
        gate: Gate | None = None,
        seconds: float | None = None,
        *,
        here: bool = False,
    ) -> None:
        self.bench = bench.begin() if here else bench
        self.gate = gate
        self._ledger = ledger
        self._seconds = seconds
        self._process = None if here else self._new()

    def run(self, case: Case) -> Record:
        """Runs one case and returns its record, whatever the case raises."""
        return replace(self._final(case), family=self.bench.matrix.techniques[case.technique].family)

    def _final(self, case: Case) -> Record:
        timed = self.gate.timed.get(case.id) if self.gate is not None else None
        if timed is not None and timed.ended is not None:  # it would do the same to this process
            record = Record(case, timed.ended.verdict, code=timed.ended.how, reason=timed.reason)
            return hold(record, self._ledger)
        record = self._judged(case)
        if self._process is not None and record.verdict in AGAIN and not case.timed:
            record = self._again(record)
        return record if self.gate is None else self.gate.keep(record)

    def _judged(self, case: Case) -> Record:
        record = self._ran(case)
        # The gate comes first: a ledger may expect a regression, and an unexpected pass is not stored.
        return hold(record if self.gate is None else self.gate.judge(record), self._ledger)

    def _again(self, first: Record) -> Record:
        """Runs a failed case again in another process: one that passes then is `flaky`."""
        runs = [first]
        while len(runs) < RUNS and (len(runs) == 1 or any(record.verdict.green for record in runs)):
            self._renew()
            runs.append(self._judged(first.case))
        if not runs[-1].verdict.green:
            self._renew()  # the next case must not see its leftovers
        if not any(record.verdict.green for record in runs):
            return first
        return replace(first, verdict=Verdict.FLAKY, runs=tuple(record.verdict for record in runs))

    def _ran(self, case: Case) -> Record:
        """Returns the record of one run of a case, before gate and ledger."""
        if self._process is None:
            return self.bench.run(case)
        if self._process.gone:  # no case has run in this process: a fork of it is as good as the first one
            self._process.close()
            try:
                self._process = self._new()
            except CleanProcessError as error:
                return Record(case, Verdict.ERROR, reason=str(error))
        patience = self.bench.matrix.techniques[case.technique].patience
        limit = seconds_of(case.level, patience) if self._seconds is None else self._seconds
        process = self._process
        try:
            record = Record.from_json(json.loads(process.call(recorded, process.begun, case, limit=limit or None)))
        except CleanProcessError as error:
            if process.gone:
                why = "the process that ran it is gone, and so is the one that starts it"
                return Record(case, Verdict.CRASH, reason=why)
            if error.end is None:
                return Record(case, Verdict.ERROR, reason=str(error))
            why, how = f"the process that ran it {error.end}", error.end.how
            return Record(case, error.end.verdict, code=how, reason=why, traceback=error.printed)
        if record.verdict is Verdict.DEVICE_LOST:
            self._renew()  # the next process may reach the device again
        return record

    def _new(self) -> CleanProcess:
        importlib.import_module("torch._dynamo")  # torch does so for the first gradient: here once, not in every fork
        return CleanProcess([], ((self.bench.begin, BEGIN),))

    def _renew(self) -> None:
        """Ends the process, so that the next case runs in another."""
        if self._process is not None:
            self._process.renew()

    def printed(self) -> str:
        """Returns the output of the last case; empty if it ran and printed in this process."""
        return "" if self._process is None else self._process.printed()

    def close(self) -> None:
        """Ends the process of the cases, or that of their references."""
        if self._process is None:
            self.bench.close()
        else:
            self._process.close()
