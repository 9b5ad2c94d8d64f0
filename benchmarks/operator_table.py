"""Stores the result of each operator of torch under each technique, from journals: baselines/DEVICE/operators.json.

    pytest --pyargs accelcheck.suite --accel-device=cpu --accel-level=3 --accel-workload='ops-*' \
        --accel-journal=ops.jsonl -n 2
    python benchmarks/operator_table.py ops.jsonl     # prints counts by technique, and stores the table

A row is an operator of `accelcheck/workloads/torch_operators.json`, a column a technique. A cell is ``right``,
``wrong`` with the fault, or ``refused`` with the exception; an operator in no journal is ``not tried``, with the reason
if left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from accelcheck.core.case import Verdict
from accelcheck.core.journal import Record
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.operator_calls import Calls
from accelcheck.workloads.operator_samples import template
from accelcheck.workloads.problem import part_of
from accelcheck.workloads.torch_operators import FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from accelcheck.core.fault import Fault
    from accelcheck.workloads.base import Workload

JUDGED = frozenset({Verdict.PASS, Verdict.FAIL, Verdict.XFAIL, Verdict.XPASS})
LONGEST = 200
"""Characters of a cell's text that are kept."""

Cells = dict[str, str]
"""Fault or refusal by operator; empty where it is right."""


def records(paths: Iterable[Path]) -> Iterator[Record]:
    """Cases of journals whose workload is a bundle of operators, or one of them."""
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                entry = msgspec.json.decode(line)
                if entry.get("kind") == "case" and entry["case"]["workload"].startswith(("ops-", "op-")):
                    yield Record.from_json(entry)


def operator_of(fault: Fault, workload: Workload) -> str:
    """The operator whose result or input's gradient is at fault; empty where neither is."""
    label = part_of(Calls(template(**_operators(workload)).calls), fault.path)
    return label.split()[0] if label else ""


def _operators(workload: Workload) -> dict[str, Any]:
    keywords: dict[str, Any] = getattr(workload.make, "keywords")  # noqa: B009 - of a partial
    return keywords


def cells(found: Iterable[Record], workloads: Mapping[str, Workload]) -> dict[str, tuple[set[str], Cells, Cells]]:
    """The tried, wrong and refused operators by technique, the last two with the reason."""
    table: dict[str, tuple[set[str], Cells, Cells]] = defaultdict(lambda: (set(), {}, {}))
    for record in found:
        tried, wrong, refused = table[record.case.technique]
        workload = workloads[record.case.workload]
        names = {operator.name for operator in _operators(workload)["operators"]}
        tried |= names
        reasons = {label.split()[0]: reason for label, reason in record.refused.items()}
        if record.verdict not in JUDGED:
            reasons = dict.fromkeys(names, record.headline)
        refused |= {name: reason[:LONGEST] for name, reason in reasons.items() if name not in refused}
        for fault in record.faults:
            if (name := operator_of(fault, workload)) and name not in wrong:
                wrong[name] = f"{record.case.mode}: {fault}"[:LONGEST]
    return table


def stored(table: Mapping[str, tuple[set[str], Cells, Cells]], operators: Mapping[str, Any]) -> dict[str, Any]:
    """The table as JSON: counts and cells by technique, and the operators that no journal has."""
    techniques = {
        name: {
            "tried": len(tried),
            "right": len(tried - wrong.keys() - refused.keys()),
            "wrong": dict(sorted(wrong.items())),
            "refused": dict(sorted((op, why) for op, why in refused.items() if op not in wrong)),
        }
        for name, (tried, wrong, refused) in sorted(table.items())
    }
    anywhere = {name for tried, *_ in table.values() for name in tried}
    absent = {name: _absence(entry) for name, entry in sorted(operators.items()) if name not in anywhere}
    return {"operators": len(operators), "techniques": techniques, "not tried": absent}


def _absence(entry: Mapping[str, Any]) -> str:
    parts: Sequence[Mapping[str, str]] = [entry[part] for part in ("floating", "further") if part in entry]
    lines = [f"{part.get('left') or part.get('apart')}" for part in parts if part.keys() & {"left", "apart"}]
    return "; ".join(dict.fromkeys(lines)) or (
        "has none of the dtypes that are tried" if not parts else "in no journal"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journals", nargs="+", type=Path, help="journals of runs on one device")
    parser.add_argument("--out", type=Path, help="file to write (default: baselines/DEVICE/operators.json)")
    arguments = parser.parse_args()
    rows = [*records(arguments.journals)]
    devices = {record.case.device for record in rows}
    if len(devices) != 1:
        parser.error(
            f"expected journals of one device with cases of operators, got {', '.join(sorted(devices)) or 'none'}"
        )
    table = stored(cells(rows, Matrix.load().workloads), json.loads(FILE.read_text(encoding="utf-8")))
    path = arguments.out or Path("baselines", devices.pop(), "operators.json")
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{'technique':20} tried  right  wrong  refused")
    for name, column in table["techniques"].items():
        counts = column["tried"], column["right"], len(column["wrong"]), len(column["refused"])
        print(f"{name:20} {counts[0]:5}  {counts[1]:5}  {counts[2]:5}  {counts[3]:7}")
    print(f"{len(table['not tried'])} of {table['operators']} operators in no journal; stored in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
