"""Back-tests accelcheck: counts real silent bugs that the suite finds by itself, and that a user's file finds.

    python benchmarks/back_test.py --json=found.json         # 66 programs: half an hour of two cores
    python benchmarks/back_test.py --journal=level4.jsonl    # and the cases of a suite run that are red because of them
    python benchmarks/back_test.py --stored=found.json --journal=level4.jsonl
    python benchmarks/back_test.py pytorch_191308 openvino_35838

The table has three columns for each program of `back_test_programs.py`:

- installed: whether the installed packages have the bug, by comparison with eager or a right result, without
  accelcheck;
- user's file: the verdict on the program as a user's own model; caught means fail, with a pass under eager unless the
  bug is eager's;
- suite: the first case of the journals, by level, that is red because of the operator and by the same symptom (dtype,
  strides, shape or numbers). Another fault with both counts too, so each fault is printed for review.

Each program runs in its own processes, because some crash.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import back_test_runs
from back_test_programs import link, programs, summary

from accelcheck.core.case import Mode, Verdict, stable_seed
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal_reading import case, lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from back_test_programs import Bug
    from torch.nn import Module

    from accelcheck.core.fault import Fault
    from accelcheck.core.journal import Record

LIMIT = 300.0
"""Seconds that a process may take."""
KINDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("compile-static", "compile-aot-eager", "compile-dynamic", "export-decomposed", "aot-inductor"), "compile"
    ),
    **dict.fromkeys(("func-jacfwd", "func-jvp"), "forward mode"),
}
"""Techniques that share decompositions, lowerings or derivatives: a bug in one is found where another is red."""
RED = frozenset({Verdict.FAIL, Verdict.XFAIL})
OTHER = frozenset({FaultKind.RAISED, FaultKind.EVIDENCE, FaultKind.STATE})
"""Kinds of faults that are not silent, or no wrong result."""
LABEL = re.compile(r"out\['(.+) [a-z0-9-]+ \d+'\].*")
"""Pattern of the path of an operator's result: its name, the dtype and the number of the sample."""
ALONE = re.compile(r"op-(.+?)(?:-further)?")
"""Pattern of the name of a workload of one operator."""
INPUT = re.compile(r"(grad:|)input\[(\d+)\]")
PACKAGES = ("torch", "onnxscript", "onnxruntime", "openvino", "torchao")
NOTHING = "no journal given"
USER = "user's file"
WIDTH = 200
"""Characters of a cell of the table."""


@dataclass(frozen=True)
class Seen:
    """A red case that shows a bug.

    Attributes:
        id: The case.
        level: Its level.
        seconds: Seconds of all its phases together.
        fault: The fault that names the operator, in one line.
    """

    id: str
    level: int
    seconds: float
    fault: str

    def __str__(self) -> str:
        return f"level {self.level}, {self.seconds:.0f} s: {self.id}: {self.fault}"


@dataclass
class Row:
    """Outcome of one bug.

    Attributes:
        name: Name of its program.
        technique: Technique under which it is wrong.
        blamed: Its operators, or the sentence that describes it.
        present: True where the installed packages have it; None where that could not be seen.
        said: The difference, or why it could not be seen.
        verdict: Verdict on the program as a user's own model; ``not applicable`` where that is no case.
        caught: True where this verdict says that the result is wrong.
        why: The first line of its reason.
        seen: The case of the suite; None where there is none.
        note: Reason why there is none, as far as known.
        searched: True where the journals have cases of such a technique; None without journals.
        faults: The first ones of the verdict on a user's file.
    """

    name: str
    technique: str
    blamed: str
    note: str
    present: bool | None = None
    said: str = ""
    verdict: str = ""
    caught: bool = False
    why: str = ""
    seen: Seen | None = None
    searched: bool | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def found(self) -> str:
        """The finder: ``suite``, ``user's file`` or ``nothing``."""
        return "suite" if self.seen else USER if self.caught else "nothing"

    def cells(self) -> list[str]:
        """The cells of its line of the table."""
        installed = {True: "has it", False: "right", None: "not seen"}[self.present]
        user = "caught" if self.caught else self.verdict
        missed = {True: f"not found: {self.note}", False: f"no case of {self.technique}, or alike", None: NOTHING}
        texts = (
            f"[{self.name}]({link(self.name)})",
            self.blamed,
            self.technique,
            f"{installed}: {self.said}",
            f"{user}: {self.why}",
        )
        return [_cell(text) for text in (*texts, str(self.seen or missed[self.searched]))]


def _cell(text: str) -> str:
    line = " ".join(text.split()).removesuffix(":").rstrip(": ").replace("|", "\\|")
    return line if len(line) <= WIDTH else f"{line[:WIDTH].rpartition(' ')[0]} ..."


def kind(technique: str) -> str:
    """Groups in which techniques are compared."""
    return KINDS.get(technique, technique)


@functools.cache
def module_of(workload: str) -> Module | None:
    """Module of a workload; None of a name that no workload has."""
    from accelcheck.techniques.matrix import Matrix

    known = Matrix.load().workloads
    return known[workload].problem(stable_seed(workload)).module if workload in known else None


def by_program(workload: str, path: str) -> str:
    """A fault's path, with the one program that reads an input instead of the input's place."""
    from accelcheck.workloads.function_parts import Functions

    place = INPUT.fullmatch(path)
    module = module_of(workload) if place else None
    readers = module.readers(int(place[2])) if place and isinstance(module, Functions) else ()
    return f"{place[1]}input[{next(iter(readers))!r}]" if place and len(readers) == 1 else path


@functools.cache
def owners(workload: str) -> Mapping[int, str]:
    """Operators of a workload's inputs, by place; empty of workloads without operators of OpInfo."""
    from accelcheck.workloads.operator_calls import Calls, Hole

    module = module_of(workload)
    calls = module.calls if isinstance(module, Calls) else ()
    # The first input is the anchor: tensors of the calls follow it.
    return {
        leaf.place + 1: call.label.rsplit(" ", 2)[0] for call in calls for leaf in call.leaves if isinstance(leaf, Hole)
    }


def operator(workload: str, path: str) -> str:
    """The operator whose result or gradient is at a path of a workload's result; empty where none can be told."""
    if named := LABEL.fullmatch(path):
        return named[1]
    gradient = INPUT.fullmatch(path)
    if gradient is None or not gradient[1]:
        return ""
    if alone := ALONE.fullmatch(workload):
        return alone[1]
    return owners(workload).get(int(gradient[2]), "") if workload.startswith("ops-") else ""


def symptoms(said: str) -> set[str]:
    """Kinds of difference that the text of `Row.said` names: ``dtype``, ``strides``, ``shape`` and ``numbers``."""
    kinds = (re.match(r"out\[\d+\]: (dtype|strides|shape):", part.strip()) for part in said.split("; "))
    return {kind[1] if kind else "numbers" for kind in kinds}


def symptom(fault: Fault) -> str:
    """Kind of difference that a fault reports, in the words of `symptoms`."""
    return fault.view if fault.kind is FaultKind.METADATA else "numbers"


def blamed(bug: Bug, record: Record, said: str = "") -> Fault | None:
    """The fault of a red record that has a bug's symptom at its operators or labels, under a technique of its kind.

    Args:
        bug: Bug to look for.
        record: Record of one case.
        said: Text of the difference that the bug makes; empty for any symptom.
    """
    technique = record.case.technique
    if record.verdict not in RED or (kind(technique) != kind(bug.technique) and technique not in bug.also):
        return None
    if bug.backward and record.case.mode is Mode.FORWARD:
        return None
    for fault in record.faults:
        if fault.kind in OTHER or fault.view == "missing" or (said and symptom(fault) not in symptoms(said)):
            continue
        there = re.fullmatch(bug.workloads, record.case.workload) is not None
        path = by_program(record.case.workload, fault.path) if there and "input" in bug.labels else fault.path
        labelled = bool(bug.labels) and there and re.fullmatch(bug.labels, path) is not None
        if labelled or (bug.operators and operator(record.case.workload, fault.path) in bug.operators):
            return fault
    return None


def first_seen(bug: Bug, records: Iterable[Record], said: str = "") -> Seen | None:
    """The first case that shows a bug, by level and then in the order of the records."""
    issues = [
        Seen(record.case.id, record.case.level, sum(record.seconds.values()), str(fault))
        for record in records
        if (fault := blamed(bug, record, said)) is not None
    ]
    return min(issues, key=lambda seen: seen.level, default=None)


def searched(journals: Sequence[Path]) -> tuple[list[Record], set[str]]:
    """The red records of journals, which may still be written, and the kinds of techniques that ran.

    Raises:
        JournalError: A journal cannot be read; the message names file, line and field.
    """
    records: list[Record] = []
    kinds: set[str] = set()
    for record in (case(line) for path in journals for line in lines(path) if line.kind == "case"):
        if record.verdict.executed:
            kinds.add(kind(record.case.technique))
        if record.verdict in RED:
            records.append(record)  # the others would fill the memory
    return records, kinds


def child(name: str, question: str, folder: Path) -> dict[str, Any]:
    """The answer of a process about one program; with the key ``error`` where it gave none.

    Args:
        name: Name of the program.
        question: One of `back_test_runs.QUESTIONS`.
        folder: Private cache folder of inductor.
    """
    # One compile thread: inductor's pool of processes would outlive a killed one.
    own = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    answer = folder / f"{name}-{question}.json"
    try:
        done = subprocess.run(
            [sys.executable, back_test_runs.__file__, name, question, str(answer)],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"expected an answer within {LIMIT:.0f} s, got none"}
    if not answer.is_file():
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"error": f"expected an answer, got exit status {done.returncode}: {last[0]}"}
    document: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return document


def tried(name: str, row: Row, folder: Path) -> None:
    """Ask both questions about a program."""
    plain = child(name, "plainly", folder)
    row.present, row.said = plain.get("present"), plain.get("said", plain.get("error", ""))
    own = child(name, "judged", folder)
    row.verdict, row.why = own.get("verdict", "no verdict"), own.get("why", own.get("error", ""))
    row.caught, row.faults = own.get("caught", False), own.get("faults", [])


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of the installed bugs by what finds them, and the share of the suite."""
    there = [row for row in rows if row.present]
    by = Counter(row.found for row in there)
    within = sum(row.searched is True for row in there)
    return {
        "programs": len(rows),
        "installed": len(there),
        "searched": within,
        "suite": by["suite"],
        USER: by[USER],
        "nothing": by["nothing"],
        "errors": sum(row.found == "nothing" and row.verdict == Verdict.ERROR for row in there),
        "share of the suite": round(by["suite"] / within, 4) if within else None,
    }


def counted(found: Mapping[str, Any]) -> str:
    """The counts in sentences."""
    share, more = found["share of the suite"], "more" if found["suite"] else "of them"
    suite = f"the suite by itself: {NOTHING}"
    if share is not None:
        suite = (
            f"the suite by itself finds {found['suite']} of the {found['searched']} whose techniques the journals have "
            f"({share:.0%})"
        )
    return (
        f"Of {found['programs']} bugs the installed packages have {found['installed']}: {suite}; "
        f"a user's file finds {found[USER]} {more}, "
        f"nothing finds {found['nothing']}. The verdict on a user's file is error for {found['errors']} of the last."
    )


def versions() -> dict[str, str]:
    """The installed versions of the packages that the bugs are in."""
    there = metadata.packages_distributions()
    return {name: metadata.version(name) for name in PACKAGES if name in there}


def stored(path: Path) -> dict[str, Row]:
    """The rows of a ``--json`` file, by name, without the findings in journals.

    Raises:
        ValueError: It is no such file.
    """
    try:
        rows = [Row(**{**row, "seen": None, "searched": None}) for row in json.loads(path.read_bytes())["bugs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected what --json wrote, got {type(error).__name__}: {error}") from error
    return {row.name: row for row in rows}


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and the counts; 1 where it could not be seen whether the installed packages have a bug."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs (default: all)")
    parser.add_argument(
        "--journal", type=Path, action="append", default=[], help="journal of a run of the suite; repeatable"
    )
    parser.add_argument("--json", type=Path, help="file to write everything to")
    parser.add_argument("--stored", type=Path, help="file of --json, whose programs do not run again")
    given = parser.parse_args(words)
    known = programs()
    for name in given.programs:
        if name not in known:
            parser.error(f"unknown program {name!r}. Legal values: {', '.join(known)}")
    records, kinds = searched(given.journal)
    before = stored(given.stored) if given.stored else {}
    rows: list[Row] = []
    print("| issue | operator or pattern | technique | installed | user's file | suite |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="back-test-") as folder:
        for name in given.programs or known:
            bug = known[name]()
            row = Row(name, bug.technique, ", ".join(bug.operators) or summary(name), bug.note)
            if name in before:
                # The program's description may have changed since.
                row = replace(before[name], technique=row.technique, blamed=row.blamed, note=row.note)
            else:
                tried(name, row, Path(folder))
            row.searched = bool({*map(kind, (bug.technique, *bug.also))} & kinds) if given.journal else None
            row.seen = first_seen(bug, records, row.said)
            rows.append(row)
            print(f"| {' | '.join(row.cells())} |", flush=True)
            if given.json:
                # After each row, so that an interrupted run keeps its rows.
                facts = {"versions": versions(), "counts": counts(rows), "bugs": [asdict(row) for row in rows]}
                given.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"\n{counted(counts(rows))}")
    return int(any(row.present is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
