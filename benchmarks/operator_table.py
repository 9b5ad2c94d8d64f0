"""Stores the result of each operator of torch under each technique, from journals: baselines/DEVICE/operators.json.

    pytest --pyargs accelcheck.suite --accel-device=cpu --accel-level=3 --accel-workload='ops-*' \
        --accel-journal=ops.jsonl -n 2
    python benchmarks/operator_table.py ops.jsonl     # prints counts by technique, and stores the table

A row is an operator of `accelcheck/workloads/torch_operators.json`, a column a technique. A cell is ``right``,
``wrong`` with the fault, ``refused`` with the exception, or ``elsewhere`` with the kernels that ran on the CPU since
the device has none; an operator in no journal is ``not tried``, with the reason if left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from accelcheck.core.case import Mode, Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import Record
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.observe import OperatorLog
from accelcheck.workloads.operator_calls import Calls
from accelcheck.workloads.operator_samples import FEW, CalledOperator, template
from accelcheck.workloads.operator_trials import seeded
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
"""Fault, refusal or kernels on the CPU by operator; empty where it is right."""


class Column(NamedTuple):
    """Operators under one technique."""

    tried: set[str]
    wrong: Cells
    refused: Cells
    elsewhere: Cells


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


@functools.cache
def kernels(operator: CalledOperator, mode: Mode) -> frozenset[str]:
    """Names of the kernels, such as ``aten::fmax``, that an operator's samples call on the CPU."""
    sampled = template((operator,), FEW)
    tensors = [value.clone().requires_grad_(value.is_floating_point()) for value in sampled.inputs]
    with OperatorLog("cpu") as log, seeded(1):
        for call in sampled.calls:
            with contextlib.suppress(RuntimeError):  # without a gradient
                outs = [out for out in call(torch.ones(1), tensors) if out.requires_grad]
                if mode is not Mode.FORWARD:
                    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return frozenset(log.names())


def cells(found: Iterable[Record], workloads: Mapping[str, Workload]) -> dict[str, Column]:
    """The tried operators by technique, and those that are wrong, refused or left the device, with the reason."""
    table: dict[str, Column] = defaultdict(lambda: Column(set(), {}, {}, {}))
    for record in found:
        column = table[record.case.technique]
        workload = workloads[record.case.workload]
        operators = _operators(workload)["operators"]
        names = {operator.name for operator in operators}
        column.tried.update(names)
        reasons = {label.split()[0]: reason for label, reason in record.refused.items()}
        if record.verdict not in JUDGED:
            reasons = dict.fromkeys(names, record.headline)
        for name, reason in reasons.items():
            column.refused.setdefault(name, reason[:LONGEST])
        strays = {name.partition(".")[0] for item in record.evidence for name, _ in item.strays}
        for operator in operators if strays else ():
            if kept := sorted(strays & kernels(operator, record.case.mode)):
                column.elsewhere.setdefault(operator.name, ", ".join(kept))
        for fault in record.faults:
            name = "" if fault.kind is FaultKind.RAISED else operator_of(fault, workload)
            if name and name not in column.wrong:
                column.wrong[name] = f"{record.case.mode}: {fault}"[:LONGEST]
    return table


def stored(table: Mapping[str, Column], operators: Mapping[str, Any]) -> dict[str, Any]:
    """The table as JSON: counts and cells by technique, and the operators that no journal has."""
    techniques = dict[str, Any]()
    for name, (tried, wrong, refused, elsewhere) in sorted(table.items()):
        left = {op: why for op, why in sorted(refused.items()) if op not in wrong}
        away = {op: why for op, why in sorted(elsewhere.items()) if op not in wrong and op not in left}
        right = len(tried - wrong.keys() - left.keys() - away.keys())
        techniques[name] = {"tried": len(tried), "right": right, "wrong": dict(sorted(wrong.items())), "refused": left}
        techniques[name] |= {"elsewhere": away} if away else {}
    anywhere = {name for column in table.values() for name in column.tried}
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
    print(f"{'technique':20} tried  right  wrong  refused  elsewhere")
    for name, column in table["techniques"].items():
        counts = (len(column.get(kind, ())) for kind in ("wrong", "refused", "elsewhere"))
        print(f"{name:20} {column['tried']:5}  {column['right']:5}  {'{:5}  {:7}  {:9}'.format(*counts)}")
    print(f"{len(table['not tried'])} of {table['operators']} operators in no journal; stored in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
