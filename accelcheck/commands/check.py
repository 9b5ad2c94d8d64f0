"""``accelcheck check``: finds techniques that are safe and faster for your own model, and what each costs."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands import session
from accelcheck.commands.common import GREEN, NOTHING, RED, add_many, add_selection, check_new, devices_of
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.commands.session import RAN, Half, Session
from accelcheck.core import foreground, quiet
from accelcheck.core.case import DTYPES, LEVELS, Case, Verdict
from accelcheck.core.journal import JournalError, Record
from accelcheck.core.journal_reading import lines, read
from accelcheck.core.selection import Selection
from accelcheck.plugin import options, registered
from accelcheck.report import console
from accelcheck.report.advice import BASE, advice, as_json, unjudgeable
from accelcheck.report.run import DeviceRun, load

if TYPE_CHECKING:
    from accelcheck.techniques.matrix import Matrix
    from accelcheck.workloads.base import Workload

LARGE = 10_000_000
"""Number of parameters from which on cases run without workers, which would each copy model and references."""
USUAL = frozenset(
    """
    eager amp-bf16 amp-fp16 grad-scaler-fp16 matmul-tf32 conv-tf32 channels-last checkpoint-non-reentrant
    compile-static compile-dynamic compile-reduce-overhead compile-max-autotune compile-openxla
    export aot-inductor onnxruntime openvino tensorrt-fp16 tensorrt-fp32 sdpa-flash sdpa-efficient sdpa-cudnn
    int8-torchao-dynamic int8-torchao-weight-only float8-torchao-dynamic float8-torchao-weight-only
    int4-torchao-weight-only optimizer-fused optimizer-foreach
    """.split()
)
"""Techniques that a model's owner would switch on; the others are tried with ``--all``."""
LEVEL = 2
"""Default level: torch.compile is of this level, since it is slow."""
SLOW = 1.0
"""Seconds of a forward pass from which on smaller example inputs are advised."""
FURTHER = 2
"""Number of further processes that time faster techniques: a recommendation rests on three processes."""
TAIL = 40
"""Number of last lines of pytest's output printed if it could not run."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "check",
        help="which techniques are safe and faster for your own model",
        description="Runs the techniques that a model's owner would switch on, judges outputs, gradients, training "
        "steps and accuracy, then times what is right. Prints a table of verdicts, speed, memory and errors beside "
        "FP32 eager, a recommendation, and what could not be said. FUNCTION takes no arguments and returns (model, "
        "inputs), (model, inputs, keywords), or a dict with the keys model, inputs, keywords, batches, loss, "
        "optimizer, data, metric, max_drop. Exits with 0 where every technique that ran is right, 1 where one is not, "
        "5 where none ran.",
    )
    command.add_argument("model", metavar="FILE:FUNCTION", help="the file, and its function (default: make)")
    add_selection(command)
    add_many(command, "--dtype", None, "storage dtypes; repeatable (default: float32)", choices=DTYPES)
    level = f"up to which level techniques are tried (default: {LEVEL}; of those named by --technique every one)"
    command.add_argument("--level", type=int, choices=LEVELS, help=level)
    command.add_argument("--all", action="store_true", help="every technique that can mean something for the model")
    command.add_argument("--no-speed", action="store_true", help="time nothing")
    journal = "new file for the records; timed cases go to FILE-speed"
    command.add_argument("--journal", type=Path, metavar="FILE", help=journal)
    command.add_argument("--report", type=Path, metavar="FILE", help="HTML page: advice, table, plot, and every case")
    add_json(command)
    command.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of pytest, after --")
    examples(
        command,
        ("accelcheck check model.py:make", "the usual techniques on every device that is present"),
        ("accelcheck check model.py:make --all", "every technique of levels 1 and 2"),
        ("accelcheck check model.py:make --technique='amp-*' --technique='compile-*'", "some of them"),
        ("accelcheck check model.py:make --device=cuda --report=model.html", "on a GPU, with a report"),
    )
    command.set_defaults(run=_check, refuse=command.error)


@dataclass(frozen=True)
class _Model:
    """Workloads that the function made, and the matrix that has them."""

    spec: str
    workloads: Sequence[Workload]
    known: Matrix

    @property
    def names(self) -> list[str]:
        return [workload.name for workload in self.workloads]


def _check(given: argparse.Namespace) -> int:
    for path in (given.journal, given.report):
        if path is not None and (why := check_new(path)):
            given.refuse(why)
    quiet.ignore_copied_trees()  # models are copied here too
    print(f"reading {given.model}", file=sys.stderr, flush=True)
    config = registered.here((given.model,))
    (workloads,) = registered.own_models(config).values()
    model = _Model(given.model, workloads, registered.matrix(config))
    words = [word.partition("=")[0] for word in given.arguments]
    own = options.use(config) != "off" or options.value(config, "processes") is not None
    own |= bool({"--accel-baseline", "--accel-processes"} & {*words})
    given.further = [] if own else [f"--accel-processes={FURTHER}"]
    model.known.check(Selection((), techniques=tuple(given.technique)))
    given.dtype = given.dtype or ["float32"]
    for name in set(given.dtype) - {name for workload in workloads for name in workload.dtypes}:
        given.refuse(f"--dtype={name}: the model has complex numbers, which half precision has not: leave it out")
    given.level = given.level or (max(LEVELS) if given.technique else LEVEL)
    if given.technique and not any(fnmatch.fnmatchcase(BASE, word) for word in given.technique):
        given.technique.append(BASE)  # where eager cannot be judged, no technique can
    given.technique = given.technique or ([] if given.all else sorted(_usual(model.known)))
    if not (devices := devices_of(given, (given.model,))):
        return NOTHING
    print(_estimate(given, model, devices), file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="accelcheck-check-") as name:
        kept = given.journal or Path(name) / "journal.jsonl"
        journals: list[Path] = []
        for device in devices:
            journal = kept if len(devices) == 1 else kept.with_stem(f"{kept.stem}-{device}")
            journals += _ran(given, model, device, journal, Path(name) / f"{device}.log")
        if not journals:
            return NOTHING
        records = _show(given, model, load(journals))
        if given.report is not None:
            with (Path(name) / "report.log").open("wb") as log:
                foreground.run([sys.executable, *session.report(journals, given.report)], output=log)
            print(f"report: {given.report}", file=sys.stderr)
    wrong = any(not record.verdict.green for record in records)
    executed = any(record.verdict.executed for record in records)
    return RED if wrong else GREEN if executed else NOTHING


def _estimate(given: argparse.Namespace, model: _Model, devices: Sequence[str]) -> str:
    """Describes the measured time of a forward pass, the estimated time of all cases, and how to need less."""
    from accelcheck.checks.estimate import seconds_of

    cases = [case for case in _cases(given, model, *devices) if not (case.timed and given.no_speed)]
    try:
        once, total = seconds_of(cases, model.known, model.workloads[0])
    except Exception as error:  # noqa: BLE001 - a model may raise anything: its cases then say so
        return f"{len(cases)} cases; a forward pass could not be timed: {type(error).__name__}"
    minutes = f"{total:.0f} s" if total < 100 else f"{total / 60:.0f} minutes"
    less = "; smaller example inputs show the same faults sooner, fewer techniques (--technique) too"
    return f"one forward pass takes {once:.2g} s, and {len(cases)} cases about {minutes}{less if once > SLOW else ''}"


def _cases(given: argparse.Namespace, model: _Model, *devices: str) -> list[Case]:
    techniques, dtypes = tuple(given.technique), tuple(given.dtype)
    return model.known.cases(Selection(devices, techniques, tuple(model.names), dtypes, level=given.level))


def _usual(known: Matrix) -> set[str]:
    """Returns the names of the default techniques, those of other packages included."""
    own = __package__.partition(".")[0] + "."
    foreign = {name for name, technique in known.techniques.items() if not type(technique).__module__.startswith(own)}
    return foreign | (USUAL & known.techniques.keys())


def _ran(given: argparse.Namespace, model: _Model, device: str, journal: Path, log: Path) -> list[Path]:
    """Judges on a device, then times what is right; returns the journals with a case."""
    cases = _cases(given, model, device)
    chosen = [
        f"--accel-model={model.spec}",
        *(f"--accel-workload={name}" for name in model.names),
        *(f"--accel-technique={name}" for name in given.technique),
        *(f"--accel-import={name}" for name in given.imports),
        f"--accel-level={given.level}",
        *(f"--accel-dtype={name}" for name in given.dtype),
    ]
    nothing_left = ("-p", "no:cacheprovider", f"--benchmark-storage=file://{log.parent}")
    leaves = f"-Wignore:{quiet.LEAVES}:FutureWarning"
    large = sum(parameter.numel() for parameter in model.workloads[0].problem(0).module.parameters()) >= LARGE
    more = [*nothing_left, leaves, *(("-n", "0") if large else ()), *given.arguments]
    written: list[Path] = []
    wanted = [case for case in cases if not case.timed]

    def start(half: Half) -> int:
        code, ran = _run(device, half, len(wanted), log)
        written.extend([half.journal] if ran else [])
        return code

    def timed() -> list[str] | None:
        right = _right(read(journal)[1]) if written and not given.no_speed else set()
        wanted[:] = [c for c in cases if c.timed and c.technique != BASE and (c.technique, c.dtype) in right]
        return [*(f"--accel-case={case.id}" for case in wanted), *given.further] if wanted else None

    Session(device, journal, chosen, more).run(start, timed)
    return written


def _right(records: Sequence[Record]) -> set[tuple[str, str]]:
    """Returns technique and dtype where every case that ran passed."""
    ran = [(record.case.technique, record.case.dtype, record.verdict) for record in records if record.verdict.executed]
    return {key[:2] for key in ran} - {key[:2] for key in ran if key[2] is not Verdict.PASS}


def _run(device: str, half: Half, total: int, log: Path) -> tuple[int, bool]:
    """Runs pytest with progress in place of its output; returns its exit code, and True if its journal has a case."""
    seen = 0
    stopped = False

    def look() -> bool:
        """Counts new records; returns True if eager cannot be judged, which ends the run."""
        nonlocal seen, stopped
        with contextlib.suppress(JournalError):  # reported at the end
            judged = sum(line.kind == "case" for line in lines(half.journal)) if half.journal.is_file() else 0
            if judged > seen:
                done(f"{device}: {'timed' if half.timed else 'judged'}", judged - seen)
                seen = judged
                stopped = stopped or unjudgeable(read(half.journal)[1]) is not None
        return stopped

    with log.open("wb") as output, console.progress("cases", total) as done:
        code = foreground.run([sys.executable, "-m", "pytest", *half.words], half.environ, output, look)
        look()
    try:
        records = read(half.journal)[1] if half.journal.is_file() else []
    except JournalError as error:
        records, code = [], code or RED
        print(f"accelcheck: {error}", file=sys.stderr)
    if not records or (code not in RAN and not stopped):
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        print("\n".join(map(console.escaped, tail)), file=sys.stderr)
        print(f"accelcheck: {shlex.join(['pytest', *half.words])} ended with {code}", file=sys.stderr)
    return code, bool(records)


def _show(given: argparse.Namespace, model: _Model, runs: Sequence[DeviceRun]) -> Sequence[Record]:
    """Prints table and advice of the runs; returns their records."""
    records = [record for run in runs for record in run.records]
    first = model.workloads[0]
    refusals = model.known.refusals(first)
    named = {name for word in given.technique or ["*"] for name in fnmatch.filter(refusals, word)}
    refused = {name: why for name, why in refusals.items() if name in named}
    if given.json:
        print_json("check", {"model": model.spec, **as_json(records, refused)})
        return records
    print(f"{first.name}: {first.summary}\n")
    console.show(advice(records, refused, runs[0].reproduction))
    return records
