"""Explains a case in a process of its own, so that a crash or a hang is explained too, and ends nothing else."""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelcheck.checks.execute import Bench, recorded
from accelcheck.core.case import Case, Verdict, seconds_of
from accelcheck.core.clean_process import CleanProcess, CleanProcessError
from accelcheck.core.journal import Record
from accelcheck.explain import text
from accelcheck.explain.alone import alone
from accelcheck.explain.ended import Elsewhere, explain_end
from accelcheck.explain.explain import ENDED, FAILED, Explanation, Steps, explain
from accelcheck.explain.script import script_of
from accelcheck.explain.smallest import RUNS, SmallestRuns
from accelcheck.explain.source import NotWrittenError
from accelcheck.explain.trail import Trail
from accelcheck.report import results
from accelcheck.report.console import Table

BEGIN = 120.0
"""Seconds for the process to begin."""
TIMES = 20.0
"""Most time of an explanation, as a multiple of the case's."""
LEAST = 300.0
"""Seconds that any explanation may take, however short the case is."""


@dataclass(frozen=True)
class Asked:
    """A request for an explanation.

    Attributes:
        bench: Bench with the case's technique, workload and device; it begins in the process that explains.
        layers: True to run the case in other layers too.
        limit: Seconds for the case; None for `seconds_of` it.
        most: Seconds for its explanation; None for `TIMES` the case, and at least `LEAST`.
        imports: Modules that a script imports besides those of the device.
        steps: File descriptor that gets a line for each step; -1 for none.
    """

    bench: Bench
    case: Case
    script: Path
    layers: bool = True
    limit: float | None = None
    most: float | None = None
    imports: Sequence[str] = ()
    steps: int = -1

    def say(self, step: str) -> None:
        """Print the next step."""
        if self.steps >= 0:
            os.write(self.steps, f"  {step} ...\n".encode())


@dataclass(frozen=True)
class Told:
    """An explanation as text and tables, and as JSON; the case's verdict, and True if a script was written."""

    lines: Sequence[str | Table]
    facts: dict[str, Any]
    verdict: Verdict
    script: bool

    @property
    def failed(self) -> bool:
        """True if there is a failure to explain."""
        return self.verdict in FAILED


def explained(asked: Asked) -> Told:
    """Explain a case in another process; a `CleanProcessError` where a fork of this process cannot compute."""
    case, bench, began = asked.case, asked.bench, time.monotonic()
    device, trail = bench.devices[case.device], Trail()
    patience = bench.matrix.techniques[case.technique].patience
    limit = seconds_of(case.level, patience) if asked.limit is None else asked.limit or None
    with closing(CleanProcess([asked, trail], ((bench.begin, BEGIN),))) as process:
        asked.say("the case itself")
        try:
            ran, took = process.call(_ran, process.begun, case, limit=limit)
            record = Record.from_json(json.loads(ran))
        except CleanProcessError as error:
            if error.end is None:
                raise
            record, took = Record(case, error.end.verdict, reason=f"the process that ran it {error.end}"), 0.0
        if record.verdict not in ENDED:
            return _whole(process, asked, record, took)
        process.renew()
        explanation, steps = Explanation(record), Steps(asked.say, asked.layers, 0.0)
        end = math.inf if asked.most is None else began + took + asked.most
        elsewhere = Elsewhere(process, trail, limit, (*device.modules, *asked.imports), end)
        remarks = explain_end(elsewhere, explanation, bench, asked.script, steps)
        explanation.seconds = took, time.monotonic() - began - took
        try:
            identity = process.call(_identity, process.begun, case.device, limit=BEGIN)
        except Exception:  # noqa: BLE001 - a device that is lost does not say what it is, in whatever way
            identity = ""
        return _told(explanation, remarks, identity, script=bool(remarks))


def _whole(process: CleanProcess, asked: Asked, record: Record, took: float) -> Told:
    """Explain a case that left its process as it was; without shrinking, where a smaller case ends it."""
    ran = json.dumps(record.as_json())
    most = max(LEAST, TIMES * took) if asked.most is None else asked.most
    for shrinking in (math.inf, 0.0):
        try:
            told: Told = process.call(_explained, process.begun, asked, ran, took, shrinking, limit=most)
        except CleanProcessError as error:
            if error.end is None:
                raise
            why = f"the process that explained it {error.end}"
            if error.end.verdict is Verdict.HANG:
                break
        else:
            if shrinking:
                return told
            note = f"not shrunk: {why}"
            facts = {**told.facts, "notes": [*told.facts["notes"], note]}
            return replace(told, lines=[*told.lines, f"note: {note}"], facts=facts)
    notes = [f"{why}: --no-layers, or another --timeout, may go further"]
    return _told(Explanation(record, notes=notes), [], "")


def explained_here(asked: Asked) -> Told:
    """Explain a case in this process, where no fork of it can compute."""
    bench = asked.bench.begin()
    asked.say("the case itself")
    ran, took = _ran(bench, asked.case)
    return _explained(bench, asked, ran, took, math.inf)


def _told(explanation: Explanation, remarks: Sequence[str], device: str, *, script: bool = False) -> Told:
    lines = [*text.report(explanation), *remarks]
    if explanation.failed:
        case, seconds = explanation.seconds
        times = f", {seconds / case:.1f} times the case's {case:.1f} s" if case else ""
        lines += ["", *filter(None, [device]), f"explained in {seconds:.1f} s{times}"]
    facts = {**text.as_json(explanation), "alone": remarks[-1] if script else None}
    return Told(lines, facts, explanation.record.verdict, script)


# In the process that explains.


def _ran(bench: Bench, case: Case) -> tuple[str, float]:
    began = time.monotonic()
    return recorded(bench, case), time.monotonic() - began


def _explained(bench: Bench, asked: Asked, ran: str, took: float, shrinking: float) -> Told:
    first = Record.from_json(json.loads(ran)), took
    explanation = explain(bench, asked.case, asked.say, with_layers=asked.layers, ran=first, shrinking=shrinking)
    remarks = _written(explanation, asked, bench) if explanation.failed else []
    return _told(explanation, remarks, _identity(bench, asked.case.device), script=len(remarks) > 1)


def _identity(bench: Bench, device: str) -> str:
    return results.identity(bench.devices[device].fingerprint())


def _written(explanation: Explanation, asked: Asked, bench: Bench) -> list[str]:
    """Write the script and run it; the lines about it."""
    if explanation.smallest is None:
        return []
    device, path, (name, *_) = bench.devices[asked.case.device], asked.script, text.all_named(explanation)
    title = f"{name} is wrong on {device.name}; found by: accelcheck explain {asked.case.id}"
    try:
        script = script_of(explanation.smallest, str(device.torch_device()), title, (*device.modules, *asked.imports))
        script.write(path)
    except (NotWrittenError, OSError) as error:
        return [f"note: no script: {error}"]
    tensors = script.subject.tensors.tensors
    shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
    values = {"ones": "of ones", "normal": "of normal numbers from a seed", "given": "with the numbers of the case"}
    runs = isinstance(explanation.smallest, SmallestRuns)
    steps = f"called with {RUNS} seeds" if runs else f"{explanation.smallest.steps} smaller cases tried"
    meanings = {0: "it is right alone: what ran before it, or beside it, matters", 1: "the fault is there"}
    head = f"\nThe smallest case\n{path}: {shapes}, {values[explanation.smallest.values]} ({steps})"
    if device.has("exclusive"):
        return [head, f"not run: one process at a time can hold {device.name}: python {path}"]
    return [head, alone(path, meanings)]
