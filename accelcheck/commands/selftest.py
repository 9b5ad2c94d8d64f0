"""``accelcheck selftest``: checks that verdicts catch every planted fault and pass every correct variant."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_device, add_many, chosen, positive, refuse, usable
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core.files import scratch
from accelcheck.devices import hardware
from accelcheck.report import console
from accelcheck.selftest import report

if TYPE_CHECKING:
    from accelcheck.selftest.runner import PlantedRow, SeedResult

SEEDS = 3
"""Default number of seeds on the CPU: 12 minutes on 2 cores."""


def add(commands: Any) -> None:
    runner = commands.add_parser(
        "selftest",
        help="plant every fault and every correct variant, and check that verdicts tell them apart",
        description="Plants every fault of the catalogue in the matrix and prints which view catches it, and plants "
        "every correct variant, which must pass. Exits with 1 if a fault survives or a correct variant fails.",
    )
    add_device(runner, "plant")
    runner.add_argument(
        "--seeds",
        type=positive,
        default=None,
        help=f"number of seeds for each plant (default: {SEEDS} on the CPU; 1 on other devices, which compile or "
        "launch more slowly)",
    )
    add_many(runner, "--fault", "GLOB", "faults and correct variants by name; repeatable (default: all)")
    runner.add_argument(
        "--jobs", type=positive, default=None, help="number of processes (default: one per core; one on an accelerator)"
    )
    add_json(runner)
    examples(
        runner,
        ("accelcheck selftest", "every fault, on the CPU"),
        ("accelcheck selftest --fault='drop-*' --seeds=1", "a quick look at some faults"),
    )
    runner.set_defaults(run=_selftest)


def _selftest(given: argparse.Namespace) -> int:
    if not usable(given.device):
        return NOTHING
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # torch reads them at import
    from accelcheck.selftest import runner

    rows = chosen("fault", runner.rows(), given.fault, lambda row: row.plant)
    on_host = given.device in {"cpu", "xla"} and not hardware.tpu().count
    seeds = given.seeds or (SEEDS if given.device == "cpu" else 1)
    jobs = given.jobs or (hardware.usable_cores() if on_host else 1)
    fewer = sum(row.tried(seeds) < seeds for row in rows)
    less = f" ({fewer} of slow techniques with fewer)" if fewer else ""
    began = f"{len(rows)} rows x {seeds} seeds{less} on {given.device}, {jobs} processes"
    print(began, file=sys.stderr if given.json else sys.stdout, flush=True)
    started = time.monotonic()
    outcomes, died = _run(given.device, rows, seeds, jobs)
    seconds = time.monotonic() - started
    if given.json:
        verdicts = [{**asdict(outcome), "good": outcome.good} for outcome in outcomes]
        print_json("selftest", {"device": given.device, "seconds": seconds, "verdicts": verdicts, "died": died})
    else:
        console.show([*report.whole(outcomes, given.device, runner.ground(rows)), f"{seconds:.0f} s"])
    if died:
        return refuse(died, RED)
    if not any(outcome.ran and not outcome.plain for outcome in outcomes):
        return NOTHING
    return GREEN if all(outcome.good for outcome in outcomes) else RED


def _run(device: str, rows: Sequence[PlantedRow], seeds: int, jobs: int) -> tuple[list[SeedResult], str]:
    """Returns the verdicts in the order of the rows, and why a process died; empty if none did."""
    from accelcheck.selftest import runner

    outcomes: list[SeedResult] = []
    died = ""
    with (
        tempfile.TemporaryDirectory(prefix="files-", dir=scratch()) as folder,
        console.progress("verdicts", sum(row.tried(seeds) for row in rows)) as done,
    ):
        try:
            for group in runner.run(device, rows, seeds, jobs, Path(folder)):
                outcomes += group
                row = group[-1].row
                done(f"{row.workload}/{row.dtype}/{row.mode}", sum(not outcome.plain for outcome in group))
        except runner.DiedError as error:
            died = str(error)
    return sorted(outcomes, key=lambda outcome: (str(outcome.row), outcome.seed)), died
