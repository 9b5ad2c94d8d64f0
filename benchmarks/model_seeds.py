"""Counts correct techniques that are called wrong for the twelve models of ``examples/models``, over seeds.

    pip install transformers                                          # the source of two models; no weights
    python benchmarks/model_seeds.py                                  # 20 seeds of each; hours of a core
    python benchmarks/model_seeds.py --seeds=3 --model=unet --technique=eager
    python benchmarks/model_seeds.py --json=baselines/cpu/model_seeds.json

Each seed has parameters and inputs of its own: seed 0 those of the file, others with their elements in another order.
Outputs, gradients and trainings are judged as by ``accelcheck check --no-speed``. A false alarm is a case
with the verdict fail, crash or hang, or an error that is not `undecided`. The exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.checks.execute import Bench
from accelcheck.core import quiet
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import Mode
from accelcheck.core.journal import ErrorCode
from accelcheck.core.registry import discover
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Device, Status
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store
from accelcheck.workloads.own_file import workloads_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcheck.core.journal import Record
    from accelcheck.workloads.base import Workload

MODELS = Path(__file__).parents[1] / "examples" / "models"
TECHNIQUES = (
    "eager",
    "amp-bf16",
    "compile-static",
    "channels-last",
    "int8-torchao-weight-only",
    "export",
    "checkpoint-non-reentrant",
)
MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN)


def word(record: Record) -> str:
    """The verdict, or `undecided`."""
    return str(record.code) if record.code == ErrorCode.UNDECIDED else str(record.verdict)


def judged(workload: Workload, techniques: dict[str, Any], device: Device) -> Iterator[Record]:
    """Yields the records of all cases of a workload on a device, in FP32."""
    matrix = Matrix(techniques, {workload.name: workload})
    with tempfile.TemporaryDirectory(prefix="accelcheck-seeds-") as folder:
        clean = clean_process(matrix.parts())
        try:
            status = Status(device.name, SUPPORTED)
            bench = Bench(matrix, {device.name: device}, {device.name: status}, Store(Path(folder), clean))
            yield from map(bench.run, matrix.cases(Selection((device.name,), dtypes=("float32",), level=4), MODES))
        finally:
            clean.close()


def main() -> int:
    names = sorted(path.stem for path in MODELS.glob("*.py"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="default: 20")
    parser.add_argument("--first", type=int, default=0, help="number of the first seed (default: 0)")
    parser.add_argument("--model", action="append", choices=names, help="repeatable (default: all)")
    parser.add_argument("--technique", action="append", metavar="GLOB", help=f"default: {' '.join(TECHNIQUES)}")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result; counts of models that it has are kept")
    given = parser.parse_args()
    quiet.ignore_copied_trees()
    words = given.technique or TECHNIQUES
    device = next(thing for thing in discover("accelcheck.devices", "DEVICES") if thing.name == given.device)
    assert isinstance(device, Device)
    known = Matrix.load().techniques
    techniques = {name: t for name, t in known.items() if any(fnmatch.fnmatchcase(name, glob) for glob in words)}
    alarms: list[str] = []
    for name in given.model or names:
        (workload, *_) = workloads_of(f"{name}.py", MODELS)
        counts: Counter[str] = Counter()
        tried: set[str] = set()
        began, wrong = time.monotonic(), []
        for seed in range(given.first, given.first + given.seeds):
            own = dataclasses.replace(workload, name=f"{name}-seed{seed}") if seed else workload
            for record in judged(own, techniques, device):
                counts[word(record)] += 1
                tried.add(f"{record.case.technique}/{record.case.mode}")
                if given.verbose:
                    first = next(iter(record.why.splitlines()), "")
                    print(f"  {record.case.id} {word(record)} {first} {dict(record.seconds)}", flush=True)
                if not record.verdict.green and word(record) != ErrorCode.UNDECIDED:
                    wrong.append(f"{record.case.id}: {next(iter(record.why.splitlines()), '')}")
                    print(f"    {wrong[-1]}", flush=True)
        alarms += wrong
        summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        print(f"{name}: {given.seeds} seeds, {summary}; {time.monotonic() - began:.0f} s", flush=True)
        if given.json is not None:
            kept = json.loads(given.json.read_text(encoding="utf-8")) if given.json.is_file() else {"models": {}}
            kept |= {"device": given.device, "torch": torch.__version__}
            facts = {"seeds": given.seeds, "cases": sorted(tried), "verdicts": dict(sorted(counts.items()))}
            kept["models"][name] = {**facts, "wrong": wrong}
            given.json.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(alarms)} false alarms")
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
