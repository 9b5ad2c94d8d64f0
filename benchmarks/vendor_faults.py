"""Plants each fault of the example device, runs a fitting part of the suite, and writes the report's findings.

    python benchmarks/vendor_faults.py > docs/vendor_faults.md

Needs `examples/vendor-device` installed. Names of faults as arguments select rows. `accelcheck explain` gets the first
case that is not right. Exits with 1 where a fault is missed, or the explanation names none of its operators.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.core.journal_reading import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelcheck.core.journal import Record

VARIABLE = "ACME_FAULT"
LIMIT = 600
"""Seconds that a run may take; each of its cases is ended far earlier."""
WIDTH = 150
"""Characters of a reason that the table shows."""
PRODUCTS = ("--accel-technique=eager", "--accel-workload=matmul", "--accel-workload=mlp")
SUMS = ("--accel-technique=eager", "--accel-workload=index-add", "--accel-level=2")
STREAMS = ("--accel-technique=acme-streams", "--accel-workload=matmul")
MATMULS, INDEXED = ("aten::mm", "aten::addmm"), ("aten::index_add",)
SHORT = ("--accel-technique=eager", "--accel-workload=mlp", "--accel-timeout=20")


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault.

    Attributes:
        name: Value of `VARIABLE`; a number after a colon is the first kernel, or the period of the fault.
        does: Effect on the hardware.
        selection: Options that choose the cases.
        operators: Faulty operators, of which `accelcheck explain` must name one; none where any may be hit.
    """

    name: str
    does: str
    selection: tuple[str, ...]
    operators: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The name without the number."""
        return self.name.partition(":")[0]


FAULTS = (
    Planted("wrong-tail", "rows of a product that fill no tile of 16 get what the tile before has", PRODUCTS, MATMULS),
    Planted("reduced-precision", "FP32 products round their operands to bfloat16", PRODUCTS, MATMULS),
    Planted(
        "stale-result", "a product of operands at known addresses gets the result of the last time", PRODUCTS, MATMULS
    ),
    Planted("flipped-bit:31", "every 31st kernel flips one bit of one element", PRODUCTS),
    Planted("lost-update", "every second sum into rows of an index loses one of two updates of one row", SUMS, INDEXED),
    Planted("duplicate-indices", "of several updates of one row the last one alone counts", SUMS, INDEXED),
    Planted("stream-race", "a stream does not wait for the event that it was told to wait for", STREAMS),
    Planted("late-copy", "a copy to the host does not wait for the kernels before it", PRODUCTS),
    Planted("lost-device:40", "from the 40th kernel on the device does not answer", SHORT),
    Planted("hang:40", "the 40th kernel never ends", SHORT),
    Planted("crash:40", "the 40th kernel ends the process with SIGSEGV", SHORT),
)
"""Faults of `examples/vendor-device/csrc`."""


@dataclass(frozen=True, slots=True)
class Row:
    """Result of a run under a fault, and the answer of `accelcheck explain` for the first case that is not right."""

    planted: Planted
    records: tuple[Record, ...]
    explained: Mapping[str, Any] = field(default_factory=dict)

    @property
    def named(self) -> list[str]:
        """The operators that the explanation names, without their overloads."""
        return [name.partition(".")[0] for name in self.explained.get("named", ())]

    @property
    def missed(self) -> str:
        """Unmet expectation; empty where all are met."""
        if not self.caught:
            return f"{self.planted.name}: no case failed"
        if self.planted.operators and not set(self.planted.operators) & set(self.named):
            return (
                f"{self.planted.name}: expected one of {', '.join(self.planted.operators)}, got {self.named or 'none'}"
            )
        return ""

    @property
    def caught(self) -> list[Record]:
        """The cases that are not right."""
        return [record for record in self.records if record.verdict.executed and not record.verdict.green]


def under(fault: str, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with these arguments, on a device with a fault."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, VARIABLE: fault},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def run(fault: str, selection: Sequence[str], folder: Path) -> tuple[Record, ...]:
    """Run a part of the suite on the device with a fault.

    Raises:
        RuntimeError: It gave no records.
    """
    journal = folder / f"{fault.partition(':')[0] or 'none'}.jsonl"
    journal.unlink(missing_ok=True)
    words = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--accel-device=acme", f"--accel-journal={journal}"]
    done = under(fault, ["-m", "pytest", "--pyargs", "accelcheck.suite", *words, *selection], folder)
    records = tuple(read(journal)[1]) if journal.is_file() else ()
    if not records:
        raise RuntimeError(
            f"{fault or 'no fault'}: the run gave no record:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return records


def rows(faults: Sequence[Planted], folder: Path) -> Iterator[Row]:
    """Makes a row for each fault, after the same cases without a fault, which must all be right.

    Raises:
        RuntimeError: A case is not right without a fault.
    """
    for selection in dict.fromkeys(planted.selection for planted in faults):
        healthy = Row(Planted("", "", selection), run("", selection, folder))
        if healthy.caught:
            raise RuntimeError(f"not right without a fault: {', '.join(fault.case.id for fault in healthy.caught)}")
    for planted in faults:
        row = Row(planted, run(planted.name, planted.selection, folder))
        yield replace(row, explained=explain(planted.name, row.caught[0].case.id, folder)) if row.caught else row


def explain(fault: str, case: str, folder: Path) -> dict[str, Any]:
    """Returns the answer of `accelcheck explain` for a case under a fault."""
    done = under(fault, ["-m", "accelcheck.cli", "explain", case, "--json", "--timeout=20"], folder)
    if done.returncode != 1:
        return {}  # it passes this time: a fault that strikes now and then
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def explanation(row: Row) -> str:
    """The layer that is to blame, the operator, and how its script ends, for a cell of a table."""
    row_text = row.explained
    if not row_text:
        return "passes this time"
    named = ", ".join(f"`{name}`" for name in row.named[:2]) or "no operator"
    ended = re.search(r"run alone, it (.+?)(?: \(|$)", row_text["alone"] or "")
    return f"{row_text['blamed'] or 'no layer alone'}: {named}" + (f"; its script {ended[1]}" if ended else "")


def headline(record: Record) -> str:
    """The first line of a reason, shortened for a cell of a table."""
    line = record.headline
    line = re.sub(r"0x[0-9a-f]+|\bprocess \d+", "...", line).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= WIDTH else f"{line[:WIDTH].rpartition(' ')[0]} ..."


def table(found: Sequence[Row]) -> str:
    """The table, in Markdown."""
    lines = [
        (
            "| `ACME_FAULT` | the hardware | cases that are not right | verdicts | what the report says first "
            "| `accelcheck explain` |\n|---|---|---|---|---|---|"
        )
    ]
    for row in found:
        caught = row.caught
        verdicts = ", ".join(sorted({str(record.verdict) for record in caught})) or "none"
        first = (
            f"`{caught[0].case.technique}/{caught[0].case.workload}` {caught[0].case.mode}: {headline(caught[0])}"
            if caught
            else ""
        )
        executed = sum(record.verdict.executed for record in row.records)
        lines.append(
            f"| `{row.planted.name}` | {row.planted.does} | {len(caught)} of {executed} | {verdicts} | {first} | "
            f"{explanation(row)} |"
        )
    return "\n".join(lines)


PAGE = """# Faults of a device, and what the report says of each

The device of [examples/vendor-device](../examples/vendor-device/README.md) can be told to have a fault of its \
hardware: `ACME_FAULT=NAME`, or `NAME:COUNT`.
`python benchmarks/vendor_faults.py > docs/vendor_faults.md` plants each of them, runs a few cases of level 1 or 2, \
explains the first that is not right, and writes
this page. Without a fault the same cases pass.

{table}

{counted} A fault that strikes whatever runs, or between operators, has none. There is no script \
where one call of the operator alone is right.

Made with torch {torch} and acme-npu {package}.
"""


def main() -> int:
    """Print the page, or some rows; 1 where a fault was not seen, or its operator not named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help="names of faults, without numbers (default: all, as a page)")
    given = parser.parse_args()
    legal = {planted.kind: planted for planted in FAULTS}
    for name in given.faults:
        if name not in legal:
            parser.error(f"unknown fault {name!r}. Legal values: {', '.join(legal)}")
    with tempfile.TemporaryDirectory(prefix="vendor-faults-") as folder:
        measured_rows = list(rows([legal[name] for name in given.faults] or FAULTS, Path(folder)))
    shown = table(measured_rows)
    within = [row for row in measured_rows if row.planted.operators]
    counted = (
        f"Of {len(within)} faults in one kind of operator, `accelcheck explain` names the operator in "
        f"{sum(not row.missed for row in within)}."
    )
    versions = {"torch": metadata.version("torch").partition("+")[0], "package": metadata.version("acme-npu")}
    print(
        shown if given.faults else PAGE.format(table=shown, counted=counted, **versions),
        end="\n" if given.faults else "",
    )
    missed = [row.missed for row in measured_rows if row.missed]
    if missed:
        print(*missed, sep="\n", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
