"""``accelcheck explain``: why a case failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE, add_import, refusal
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core import imports
from accelcheck.core.files import file_name, scratch
from accelcheck.core.matrix import Selection, unknown_case
from accelcheck.core.words import LEVELS
from accelcheck.expectations.ledger import Ledger
from accelcheck.plugin import registered
from accelcheck.report import console, results

if TYPE_CHECKING:
    import argparse

    from accelcheck.devices.base import Device
    from accelcheck.experiments.explain.explain import Explanation

PARTS = 5
"""Of a case id: technique, workload, device, dtype, mode."""
SECONDS = 300.0
"""That a script may take."""


def add(commands: Any) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "explain",
        help="say why a case failed: which layer, which operator, and the smallest script that shows it",
        description="Runs a case that fails, says which layer is wrong (device kernel, capture, compiler or technique), computes each "
        "operator of the failing run again in FP64 from the inputs that it had, names the first whose own error exceeds the budget of "
        "its own rounding, and writes a script of that operator alone, which exits with 1 while the fault is there. Exits with 1 if "
        "the case fails, with 0 if it passes, with 5 if it does not run here.",
    )
    command.add_argument("case", metavar="CASE", help="id of a case of any level, as reports and journals have it")
    add_import(command)
    command.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="where the script is written, its data beside it (default: explain-CASE.py in this folder)",
    )
    command.add_argument(
        "--no-layers", action="store_true", help="do not run the other layers, of which compilers take seconds"
    )
    add_json(command)
    examples(
        command,
        ("accelcheck explain eager/mlp/cuda/bfloat16/backward", "a case that a report calls failed"),
        ("accelcheck explain eager/mlp/toy/float32/forward --import toy_backend", "on a backend that is imported"),
    )
    command.set_defaults(run=_explain)


def _explain(given: argparse.Namespace) -> int:
    parts = given.case.split("/")
    if len(parts) != PARTS:
        print(f"accelcheck: {unknown_case(given.case, ())}", file=sys.stderr)
        return USAGE
    absent = refusal(parts[2])
    if absent is not None:
        print(
            f"accelcheck: {given.case}: nothing to explain: {parts[2]} cannot be used here: {absent}", file=sys.stderr
        )
        return NOTHING
    # torch reads it at import: no pool of compiling processes for one case.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    script = given.script or Path(f"explain-{file_name(given.case)}.py")
    with tempfile.TemporaryDirectory(prefix="files-", dir=scratch()) as folder:
        device = registered.device(parts[2])
        found = _found(given, device, Path(folder))
    from accelcheck.experiments.explain import text

    said = [] if not found.failed else _written(found, script, device)
    if given.json:
        print_json("explain", {**text.as_json(found), "script": str(script) if said else None})
    else:
        console.show([*text.report(found), *said, *_ending(found, device)])
    if found.failed:
        return RED
    return GREEN if found.record.verdict.executed else NOTHING


def _found(given: argparse.Namespace, device: Device, folder: Path) -> Explanation:
    from accelcheck.checks.execute import Bench
    from accelcheck.core.capability import SUPPORTED
    from accelcheck.devices.base import Status
    from accelcheck.experiments.explain.explain import explain
    from accelcheck.verify.cache import clean_process
    from accelcheck.verify.oracle import Store

    matrix = registered.matrix(registered.here())
    selection = Selection((device.name,), cases=(given.case,), level=max(LEVELS))
    matrix.check(selection)
    (case,) = matrix.cases(selection)
    store = Store(folder, clean_process(matrix.parts()))
    bench = Bench(matrix, {device.name: device}, {device.name: Status(device.name, SUPPORTED)}, store, Ledger())
    say = lambda step: print(f"  {step} ...", file=sys.stderr, flush=True)  # noqa: E731 - one line, for one call
    return explain(bench, case, say, with_layers=not given.no_layers)


def _written(found: Explanation, path: Path, device: Device) -> list[str]:
    """Write the script and run it; what is said of it."""
    if found.smallest is None or found.culprit is None:
        return []
    from accelcheck.experiments.explain.script import OperatorScript

    title = f"{found.culprit.operator} is wrong on {device.name}; found by: accelcheck explain {found.record.case.id}"
    OperatorScript(found.smallest, str(device.torch_device()), title, imports.announced()).write(path)
    shapes = ", ".join(
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in found.smallest.call.tensors()
    )
    values = {"ones": "of ones", "normal": "of normal numbers from a seed", "given": "with the numbers of the case"}
    head = f"\nThe smallest case\n{path}: {shapes}, {values[found.smallest.values]} ({found.smallest.steps} smaller cases tried)"
    folders = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    try:
        ended = subprocess.run(  # noqa: S603 - a script that was just written here, by this interpreter
            [sys.executable, path.name],
            env={**os.environ, "PYTHONPATH": folders},
            cwd=path.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [head, f"run alone, it had not ended after {SECONDS:g} s"]
    last = next(reversed((ended.stdout or ended.stderr).strip().splitlines()), "it printed nothing")
    meaning = {0: "the operator is right alone: what ran before it, or beside it, matters", 1: "the fault is there"}
    return [head, f"run alone, it exits with {ended.returncode} ({meaning.get(ended.returncode, 'an error')}): {last}"]


def _ending(found: Explanation, device: Device) -> list[str]:
    if not found.failed:
        return []
    case, explanation = found.seconds
    times = f"{explanation / case:.1f} times the case's {case:.1f} s" if case else ""
    return ["", results.identity(device.fingerprint()), f"explained in {explanation:.1f} s, {times}"]


COMMANDS = (add,)
