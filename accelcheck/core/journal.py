"""The journal: a JSON line for each case, written during the run. All reports are made from it. No torch."""

import fcntl
import json
import math
import os
import stat
import threading
import time
from collections.abc import Mapping  # at run time: msgspec reads the annotations of records
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from accelcheck.core.case import Case, Evidence, Figure, Measurement, Verdict
from accelcheck.core.errors import InputError
from accelcheck.core.fault import Fault
from accelcheck.core.plain import LARGEST, text, with_floats

SCHEMA = 3
"""Version of the record layout."""
OLDER = 2
"""The version before, which is read too: its failures have their faults as lines of `Record.reason`."""

MOST_REASON = 100_000
"""Longest reason or traceback, in characters."""


class ErrorCode(StrEnum):
    """Errors that are no exceptions: `Record.code` of cases of the verdict ``error``."""

    NO_EVIDENCE = "no-evidence"
    NOTHING_COMPARED = "nothing-compared"
    IMPLAUSIBLE = "implausible"
    """The timed calls cannot have done the work."""
    NO_BASELINE = "no-baseline"
    """The case has a baseline, but no figure to compare with it."""
    NOT_COLLECTED = "not-collected"
    UNDECIDED = "undecided"
    """A user-owned model has no reference, nothing to judge, or too few samples: it is neither right nor wrong."""


class JournalError(InputError):
    """A journal cannot be written, or a line is malformed; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Known:
    """The expectation that an entry of a ledger has of a case.

    Attributes:
        at_most: Largest expected size of a fault, or the class of an exception.
        fault: Fault that the entry is about and does not cover; None where the case does not fail, or as expected.
    """

    verdict: Verdict
    at_most: float | str
    reason: str
    link: str
    fault: Fault | None = None

    def __str__(self) -> str:
        if self.fault is None:
            return f"the ledger expects {self.verdict}: {self.reason}"
        if isinstance(self.at_most, str):
            return f"ledger: expected {self.at_most}, got {self.fault.view} ({self.reason})"
        if self.at_most == 0:
            limit = "the entry has at-most = 0, which covers faults without a size only"
        else:
            unit = " times the budget" if self.fault.bounded else ""
            limit = f"expected at most {self.at_most:g}{unit}, got {self.fault.size or 0.0:.4g}"
        return f"ledger: {limit} ({self.reason}): {self.fault}"


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one case.

    Attributes:
        case: The case.
        verdict: Its result.
        code: An `accelcheck.core.capability.Code` of a case that did not run, an `ErrorCode`, or the end of the process
            of a `crash`, such as ``SIGSEGV`` or ``status 3``; empty otherwise.
        reason: Why it did not run, the text of an error, or why a failure is expected: one or several lines. For a
            `flaky` case, that of the first wrong run.
        evidence: Observations that show whether the technique ran.
        figures: For every view the figure with the largest used part of its budget, and all figures over their budgets.
        compared: Number of elements compared with the oracle.
        eager_excess: Eager's error divided by that of the rounding samples; see `accelcheck.verify.oracle`.
        seconds: Wall time by phase: ``oracle``, ``prepare`` (compile, warm up), ``run``, ``evidence``, ``judge``.
        traceback: Traceback of an `error`; empty otherwise.
        measurements: Time and memory of a timed case that passes.
        digest: Digest of everything that the work of a timed case depends on; empty for others.
        times: Seconds a call, one figure for each block of calls, in the order of measurement.
        remark: Gaps and contradictions of the stored statements about the chip: see `accelcheck.expectations.chips`.
        faults: Faults of a `fail`, of an expected failure, and of the first wrong run of a `flaky` case.
        known: Ledger entries for a case that fails as they say, that passes, or whose faults are larger.
        runs: Verdicts of all runs of a `flaky` case, the first wrong one first; empty for others.
        family: Family of the technique, such as ``compile``; empty in older journals, and where a process was gone
            before any case of the technique had ended.
        refused: Reasons of the parts of a workload that the technique refuses, by label: these parts are not judged.
    """

    case: Case
    verdict: Verdict
    code: str = ""
    reason: str = ""
    evidence: tuple[Evidence, ...] = ()
    figures: tuple[Figure, ...] = ()
    compared: int = 0
    eager_excess: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    traceback: str = ""
    measurements: tuple[Measurement, ...] = ()
    digest: str = ""
    times: tuple[float, ...] = ()
    remark: str = ""
    faults: tuple[Fault, ...] = ()
    known: tuple[Known, ...] = ()
    runs: tuple[Verdict, ...] = ()
    family: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", text(self.reason, MOST_REASON))
        object.__setattr__(self, "traceback", text(self.traceback, MOST_REASON))
        if not 0 <= self.compared <= LARGEST:
            got = f"{self.compared:,}" if abs(self.compared) <= LARGEST else "a larger number"
            raise ValueError(f"field 'compared' is {got}; expected 0 to {LARGEST:,}")

    @property
    def why(self) -> str:
        """Lines for people: the wrong runs of a `flaky` case, the reason, each fault, and the ledger's expectations."""
        wrong = sum(not verdict.green for verdict in self.runs)
        runs = f"{wrong} of {len(self.runs)} runs were not right; the first one: {self.runs[0]}" if self.runs else ""
        known = () if self.verdict is Verdict.XFAIL else self.known
        return "\n".join(filter(None, [runs, self.reason, *map(str, self.faults), *map(str, known)]))

    @property
    def headline(self) -> str:
        """The first line of `why`."""
        return self.why.partition("\n")[0]

    @property
    def contradiction(self) -> str:
        """The contradiction within a `pass` that no run writes; empty without one, and for other verdicts."""
        if self.verdict is not Verdict.PASS:
            return ""
        if not self.compared:
            return "no element was compared"
        if absent := next((observation.claim for observation in self.evidence if not observation.engaged), None):
            return f"not engaged: {absent}"
        beyond = next((figure for figure in self.figures if figure.gates and not figure.within), None)
        return f"{beyond.path}: {beyond.view} is beyond its budget" if beyond is not None else ""

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values; non-finite numbers become the strings ``inf`` and ``nan``, which `float` reads back."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        plain["case"] |= {"id": self.case.id, "seed": self.case.seed}
        plain["seconds"] = {phase: round(value, 4) for phase, value in self.seconds.items()}
        plain["kind"] = "case"
        cleaned: dict[str, Any] = finite(plain)
        return cleaned

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A record from the values of `as_json`; unknown fields are ignored, and a `JournalError` names a wrong one."""
        try:
            return msgspec.convert(data, cls, strict=False)  # `inf` and `nan` are texts in JSON
        except (msgspec.ValidationError, OverflowError, RecursionError) as error:
            raise JournalError(f"not a case record: {error}") from error


ENDING = 3.0
"""Seconds that children of a run may take to end after it."""


class Journal:
    """Writes each record at once as a line, so that it survives a crash of the run; a thread syncs lines to the disk.

    The file is created, or truncated, at once, and no other run can write to it until `end`. A run that is `resumed`
    appends to it instead; a last line that was cut short is removed. A `JournalError` where the file cannot be written,
    is a symbolic link, or another run writes to it.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                raise JournalError(f"the journal {path} is a symbolic link: give --accel-journal the file itself")
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        self._lock()
        self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        self._size = path.read_bytes().rfind(b"\n") + 1 if resumed else 0
        if self._regular:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, 0, os.SEEK_END)
        self._written, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def _lock(self) -> None:
        """Locks the file for this run. A child of a run that has ended may hold it until it ends too."""
        until = time.monotonic() + ENDING
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                os.close(self._file)
                busy = f"another run is writing to the journal {self.path}: give each run one of its own"
                raise JournalError(busy) from error
            return

    def header(self, facts: Mapping[str, Any]) -> None:
        """Writes the first line: versions, options, devices."""
        self._line(finite({"kind": "run", "schema": SCHEMA, **facts}))

    def resumed(self, facts: Mapping[str, Any]) -> None:
        """Writes the line at which a run goes on."""
        self._line(finite({"kind": "resumed", **facts}))

    def case(self, record: Mapping[str, Any]) -> None:
        """Writes one case, as `Record.as_json` gives it."""
        self._line(record)

    def end(self, facts: Mapping[str, Any]) -> None:
        """Writes the last line, counts and exit status, without which a journal was cut off; closes the file."""
        try:
            self._line(finite({"kind": "end", **facts}))
        finally:
            self.close()

    def close(self) -> None:
        """Syncs the file and lets others write to it; a second time nothing happens."""
        if self._over.is_set():
            return
        self._over.set()
        self._written.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):  # a pipe or a terminal
            os.fsync(self._file)
        os.close(self._file)

    def _line(self, data: Mapping[str, Any]) -> None:
        line = msgspec.json.encode(data, order="sorted") + b"\n"
        if not line.isascii():  # some editors and tools break lines at other characters, or cannot read them
            line = (json.dumps(data, allow_nan=False, sort_keys=True) + "\n").encode("ascii")
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            if self._regular:  # it ends with a whole line
                with suppress(OSError):
                    os.ftruncate(self._file, self._size)
                    os.lseek(self._file, 0, os.SEEK_END)
            raise self._unwritable(error) from error
        self._size += len(line)
        if self._regular and self._thread is None:
            self._thread = threading.Thread(target=self._sync, name="accelcheck-journal", daemon=True)
            self._thread.start()
        self._written.set()

    def _sync(self) -> None:
        # Beside the run: a sync takes longer than a small case may cost.
        while not self._over.is_set():
            self._written.wait()
            self._written.clear()
            with suppress(OSError):
                os.fsync(self._file)

    def _unwritable(self, error: OSError) -> JournalError:
        return JournalError(
            f"the journal {self.path} cannot be written: {error.strerror or error}; "
            "give --accel-journal a path in a folder that you may write to"
        )


def finite(value: Any) -> Any:
    """JSON-ready values, in which numbers that JSON does not have are texts."""
    return with_floats(value, lambda number: number if math.isfinite(number) else str(number))
