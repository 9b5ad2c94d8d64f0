"""``accelcheck``: what is asked outside of a pytest run."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck import matrix
from accelcheck.devices import hardware
from accelcheck.devices.probe import probe
from accelcheck.registry import UnknownNameError, unknown
from accelcheck.report import selftest as report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.qualify.selftest import Row

PATIENCE = 20.0
"""Seconds between two lines that say how far it is."""

GREEN, RED, USAGE, NOTHING = 0, 1, 4, 5
"""Exit codes: as pytest has them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code is returned."""
    parser = argparse.ArgumentParser(prog="accelcheck", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    selftest = commands.add_parser(
        "selftest",
        help="plant every fault and every correct variant, and see that verdicts tell them apart",
        description="Plants every fault of the catalogue in the matrix and prints which view catches it; then every correct "
        "variant, none of which may be called wrong. Exits with 1 if a fault survives or a correct variant fails.",
    )
    selftest.add_argument("--device", default="cpu", help="device to plant on (cpu)")
    selftest.add_argument("--seeds", type=_positive, default=20, help="seeds for each plant (20)")
    selftest.add_argument(
        "--fault", action="append", default=[], metavar="GLOB", help="plants by name; repeatable (all)"
    )
    selftest.add_argument(
        "--jobs", type=_positive, default=None, help="processes (one a core; one on a single accelerator)"
    )
    selftest.set_defaults(run=_selftest)
    listing = commands.add_parser(
        "list",
        help="every technique, and whether it runs on each device",
        description="Prints the capability table: every technique by family, each device's answer, and the reasons. Nothing is run.",
    )
    listing.add_argument("--device", action="append", default=[], help="devices to ask; repeatable (all)")
    listing.add_argument(
        "--technique", action="append", default=[], metavar="GLOB", help="techniques by name; repeatable (all)"
    )
    listing.add_argument(
        "--markdown", action="store_true", help="as docs/techniques.md, which is the same on every machine"
    )
    listing.set_defaults(run=_list)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except UnknownNameError as error:
        print(f"accelcheck: {error}", file=sys.stderr)
        return USAGE


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return number


def _selftest(given: argparse.Namespace) -> int:
    refusal = _refusal(given.device)
    if refusal is not None:
        print(f"accelcheck: {given.device}: {refusal}", file=sys.stderr)
        return NOTHING
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # read when torch is imported
    from accelcheck.qualify import selftest

    rows = _chosen(selftest.rows(), given.fault)
    on_host = given.device in {"cpu", "xla"} and not hardware.tpu().count
    jobs = given.jobs or (hardware.usable_cores() if on_host else 1)
    print(f"{len(rows)} rows x {given.seeds} seeds on {given.device}, {jobs} processes", flush=True)
    outcomes: list[selftest.Outcome] = []
    died = ""
    started = spoken = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accelcheck-") as folder:
        try:
            for group in selftest.run(given.device, rows, given.seeds, jobs, Path(folder)):
                outcomes += group
                if time.monotonic() - spoken > PATIENCE:
                    spoken = time.monotonic()
                    done = sum(not outcome.plain for outcome in outcomes)
                    print(f"  {done} of {len(rows) * given.seeds} verdicts, {spoken - started:.0f} s", flush=True)
        except selftest.DiedError as error:
            died = str(error)
    outcomes.sort(key=lambda outcome: (str(outcome.row), outcome.seed))
    for line in report.whole(outcomes, given.device):
        print(line)
    print(f"{time.monotonic() - started:.0f} s")
    if died:
        print(f"accelcheck: {died}", file=sys.stderr)
        return RED
    if not any(outcome.ran and not outcome.plain for outcome in outcomes):
        return NOTHING
    return GREEN if all(outcome.good for outcome in outcomes) else RED


def _list(given: argparse.Namespace) -> int:
    from accelcheck import table
    from accelcheck.report import table as shown

    places = table.columns(given.device)
    known = matrix.Matrix.load()
    known.check(matrix.Selection((), techniques=tuple(given.technique)))
    rows = [
        row
        for row in table.rows(known, places)
        if not given.technique or any(fnmatch.fnmatchcase(row.name, glob) for glob in given.technique)
    ]
    if given.markdown:
        lines = shown.markdown(rows, known.workloads.values())
    else:
        statuses, _ = probe([name for name in places if name != table.GENERIC])
        lines = shown.text(rows, statuses)
    print("\n".join(lines))
    return GREEN


def _refusal(device: str) -> str | None:
    """Why a device cannot be used here, if it cannot.

    Raises:
        UnknownNameError: There is no such device.
    """
    known = matrix.devices()
    if device not in known:
        raise unknown("device", device, sorted(known))
    if device == "xla" and not hardware.tpu().count:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    statuses, _ = probe([device])
    return None if statuses[device].present else str(statuses[device].capability)


def _chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    legal = sorted({row.plant for row in rows})
    for pattern in patterns:
        if not fnmatch.filter(legal, pattern):
            raise unknown("fault", pattern, legal)
    return [row for row in rows if not patterns or any(fnmatch.fnmatchcase(row.plant, p) for p in patterns)]
