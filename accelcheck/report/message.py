"""Formats a failing case: the expected and the actual result, and the command that reproduces it. No torch."""

import shlex
from collections.abc import Iterable

from accelcheck.core.case import Case, Verdict
from accelcheck.core.journal import Record
from accelcheck.report.console import escaped


def reproduce(case: Case, more: Iterable[str] = ()) -> str:
    """Command that runs this case alone, with more options."""
    words = ["pytest", "--pyargs", "accelcheck.suite", f"--accel-device={case.device}", f"--accel-case={case.id}"]
    return shlex.join([*words, *more])


def explain(record: Record, more: Iterable[str] = (), command: str = "") -> str:
    """Format a record in several lines; `more` are options of pytest for the reproduction, which `command` replaces."""
    lines = [f"{record.case.id}: {record.verdict}", ""]
    lines += [f"  {line}" for line in record.why.splitlines()]
    if record.verdict is not Verdict.FAIL and record.traceback:
        lines += ["", *(f"  {line}" for line in record.traceback.rstrip().splitlines())]
    if record.figures:
        lines += ["", f"  {'view':<8}{'measured':>12}{'allowed':>12}  worst place"]
        lines += [
            f"  {f.view:<8}{f.measured:>12.3e}{f.allowed:>12.3e}  {f.path}{' ' + f.where if f.where else ''}"
            f"{'' if f.within else '  <-- beyond' if f.gates else '  (beyond; not a gate)'}"
            for f in record.figures
        ]
    if record.evidence:
        lines += ["", "  evidence:"]
        for e in record.evidence:
            answer = ("yes" if e.engaged else "NO ") if e.seen else "?  "
            lines.append(f"    {answer} {e.label}: {e.observed}")
    lines += ["", f"  reproduce: {command or reproduce(record.case, more)}"]
    return "\n".join(escaped(line.expandtabs()) for line in lines)
