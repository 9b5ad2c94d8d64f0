"""Measures the largest fault that each entry of accelcheck's ledgers covers, beside the entry's `at-most`.

Runs every case that the ledgers of a device name and judges all its draws. Prints for each entry the number of cases
that showed it, the largest size and the limit; then each fault without an entry. Renews limits after a new torch or new
budgets:

    python benchmarks/ledger_sizes.py cpu
    PJRT_DEVICE=CPU python benchmarks/ledger_sizes.py xla --cases 'eager/*'
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.checks.execute import Bench
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Status
from accelcheck.expectations.ledger import Entry, Ledger, shipped, shown
from accelcheck.plugin import registered
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store

if TYPE_CHECKING:
    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record


def main(words: list[str]) -> int:
    """Measure, print; 1 where a fault exceeds its entry, no entry finds it, or an entry was never seen, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="name of a device that is present")
    parser.add_argument("--cases", default="*", help="glob of case ids")
    parser.add_argument("--level", type=int, default=4, help="highest level of the cases")
    parser.add_argument("--lines", type=Path, help="file for every line of every failure, with its case")
    given = parser.parse_args(words)
    ledger = Ledger.load(shipped((given.device,)))
    seen: dict[int, list[_Shown]] = defaultdict(list)
    loose: list[str] = []
    ran: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        device = registered.device(given.device)
        matrix = Matrix.load()
        statuses = {device.name: Status(device.name, SUPPORTED)}
        bench = Bench(matrix, {device.name: device}, statuses, Store(Path(folder)))
        for case in matrix.cases(Selection((device.name,), level=given.level)):
            if not ledger.covering(case.id) or not fnmatch.fnmatchcase(case.id, given.cases):
                continue
            record = bench.run(case)
            ran.add(case.id)
            print(f"{record.verdict:12} {case.id}", flush=True)
            if given.lines is not None:
                with given.lines.open("a", encoding="utf-8") as file:
                    file.writelines(f"{case.id}\t{record.verdict}\t{line}\n" for line in record.why.splitlines())
            if record.verdict in {Verdict.FAIL, Verdict.ERROR}:
                loose += _sort(record, case, ledger, seen)
    amiss = bool(loose)
    for number, entry in enumerate(ledger.entries):
        if any(fnmatch.fnmatchcase(name, glob) for name in ran for glob in entry.cases):
            amiss |= _report(entry, seen[number])
    for line in loose:
        print(f"no entry: {line}")
    return int(amiss)


_Shown = tuple[float, str, Fault]
"""The size of a fault, its case, and the fault."""


def _sort(record: Record, case: Case, ledger: Ledger, seen: dict[int, list[_Shown]]) -> list[str]:
    """Add each fault of a failure to the entries that find it; returns those that none finds."""
    covering = ledger.covering(case.id)
    loose = []
    for fault in shown(record):
        finders = [n for n, entry in enumerate(ledger.entries) if entry in covering and entry.finds(fault)]
        for number in finders:
            seen[number].append((fault.size or 0.0, case.id, fault))
        if not finders:
            loose.append(f"{case.id}: {fault}")
    return loose


def _report(entry: Entry, found: list[_Shown]) -> bool:
    """Print one entry, with the largest size of each kind of fault; whether it is too small, or was never seen."""
    largest, example = max(((size, f"{name}: {fault}") for size, name, fault in found), default=(0.0, "never seen"))
    kinds: dict[str, float] = defaultdict(float)
    for size, _, fault in found:
        kinds[fault.what] = max(kinds[fault.what], size)
    cases = {name for _, name, _ in found}
    print(
        f"{len(cases)} cases, largest {largest:.4g}, at-most {entry.at_most}: {entry.names} ({entry.reason}): {example}"
    )
    print("   ", ", ".join(f"{what} {value:.4g}" for what, value in kinds.items()))
    return not found or (isinstance(entry.at_most, float) and largest > entry.at_most)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
