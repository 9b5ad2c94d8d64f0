"""What a failing case says: the case, what was expected, what came, and the one command that shows it again. No torch."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from accelcheck.case import Verdict

if TYPE_CHECKING:
    from accelcheck.case import Case
    from accelcheck.journal import Record


def reproduce(case: Case) -> str:
    """The command that runs this case alone."""
    words = ["pytest", "--pyargs", "accelcheck.suite", f"--accel-device={case.device}", f"--accel-case={case.id}"]
    return shlex.join(words)


def explain(record: Record) -> str:
    """Several lines for a terminal or a report."""
    lines = [f"{record.case.id}: {record.verdict}", ""]
    lines += [f"  {line}" for line in record.reason.splitlines()]
    if record.verdict is Verdict.ERROR and record.traceback:
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
        lines += [f"    {'yes' if e.engaged else 'NO '} {e.claim}: {e.observed}" for e in record.evidence]
    lines += ["", f"  reproduce: {reproduce(record.case)}"]
    return "\n".join(lines)
