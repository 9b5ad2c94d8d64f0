"""``accelcheck explain``: finds out why a case failed."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_import, add_many, refusal, refuse
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core import imports
from accelcheck.core.case import LEVELS
from accelcheck.core.files import file_name, scratch
from accelcheck.core.selection import Selection
from accelcheck.plugin import registered
from accelcheck.report import console
from accelcheck.techniques.matrix import unknown_case

if TYPE_CHECKING:
    from accelcheck.explain.apart import Told

PARTS = 5
"""Number of parts of a case id: technique, workload, device, dtype, mode."""


def add(commands: Any) -> None:
    command = commands.add_parser(
        "explain",
        help="say why a case failed: which layer, which operator, and the smallest script that shows it",
        description="Runs a case that fails, says which layer is wrong (device kernel, capture, compiler or "
        "technique), computes each operator of the failing run again in FP64 from the inputs that it had, names the "
        "first whose own error exceeds the budget of its own rounding, and writes a script of that operator alone, "
        "which exits with 1 while the fault is there. Of compiled code it names the first wrong part of the graph; of "
        "a crash, a hang or a lost device the operator that was running. Exits with 1 if the case fails, with 0 if it "
        "passes, with 5 if it does not run here.",
    )
    command.add_argument("case", metavar="CASE", help="id of a case of any level, as reports and journals have it")
    add_import(command)
    command.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="where the script is written, its data beside it (default: explain-CASE.py in this folder)",
    )
    meaning = "the model of a case of accelcheck check, or of a run with --accel-model; repeatable"
    add_many(command, "--model", "FILE:FUNCTION", meaning)
    command.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="end the case after so many seconds and call it a hang; 0: no limit (default: by its level, as in a run)",
    )
    command.add_argument(
        "--no-layers", action="store_true", help="do not run the other layers, of which compilers take seconds"
    )
    add_json(command)
    examples(
        command,
        ("accelcheck explain eager/mlp/cuda/bfloat16/backward", "a case that a report calls failed"),
        ("accelcheck explain eager/mlp/toy/float32/forward --import toy_backend", "on a backend that is imported"),
        ("accelcheck explain amp-bf16/model/cpu/float32/forward --model model.py:make", "of a model of your own"),
    )
    command.set_defaults(run=_explain)


def _explain(given: argparse.Namespace) -> int:
    parts = given.case.split("/")
    if len(parts) != PARTS:
        return refuse(unknown_case(given.case, ()))
    if (absent := refusal(parts[2])) is not None:
        return refuse(f"{given.case}: nothing to explain: {parts[2]} cannot be used here: {absent}", NOTHING)
    # torch reads it at import: no pool of compiling processes for one case.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    script = given.script or Path(f"explain-{file_name(given.case)}.py")
    with tempfile.TemporaryDirectory(prefix="files-", dir=scratch()) as folder:
        told = _told(given, parts[2], script.absolute(), Path(folder))
    if given.json:
        print_json("explain", {**told.facts, "script": str(script) if told.script else None})
    else:
        console.show(told.lines)
    if told.failed:
        return RED
    return GREEN if told.verdict.executed else NOTHING


def _told(given: argparse.Namespace, name: str, script: Path, folder: Path) -> Told:
    from accelcheck.checks.execute import Bench
    from accelcheck.core.capability import SUPPORTED
    from accelcheck.core.clean_process import CleanProcessError
    from accelcheck.devices.base import Status
    from accelcheck.explain.apart import Asked, explained, explained_here
    from accelcheck.verify.oracle import Store

    device = registered.device(name)
    matrix = registered.matrix(registered.here(tuple(given.model)), given.case)
    selection = Selection((name,), cases=(given.case,), level=max(LEVELS))
    matrix.check(selection)
    (case,) = matrix.cases(selection)

    bench = Bench(matrix, {name: device}, {name: Status(name, SUPPORTED)}, Store(folder))
    steps = os.dup(2)  # the fork has another standard error
    layers, limit = not given.no_layers, given.timeout
    asked = Asked(bench, case, script, layers=layers, limit=limit, imports=imports.announced(), steps=steps)
    try:
        return explained(asked)
    except CleanProcessError as error:
        print(f"accelcheck: a crash or hang of the case ends this process too: {error}", file=sys.stderr)
        return explained_here(asked)
