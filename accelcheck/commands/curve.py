"""``accelcheck curve``: measures from how many cheap statements on torch.compile is faster than eager."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_device, add_results, usable
from accelcheck.commands.parsing import examples
from accelcheck.core.registry import unknown
from accelcheck.experiments import curve_report as report
from accelcheck.measure.curve import COUNTS, MOST, Form, Point, Shapes
from accelcheck.plugin import registered
from accelcheck.report import console, results

KIND = "curve"


def add(commands: Any) -> None:
    curve = commands.add_parser(
        KIND,
        help="eager, static and dynamic torch.compile over 1 to 30 cheap statements, and where they break even",
        description="Measures a chain of element-wise statements, on a fixed shape and on a stream of varying ones, "
        "eagerly and compiled with dynamic=False and dynamic=True, and prints the number of statements from which on "
        "compiled code is faster.",
    )
    add_device(curve, "measure")
    curve.add_argument(
        "--counts", default=",".join(map(str, COUNTS)), metavar="N,N,...", help="numbers of statements (%(default)s)"
    )
    curve.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curve; needs matplotlib")
    add_results(curve)
    examples(
        curve,
        ("accelcheck curve --plot curve.png", "the whole curve on the CPU, and its picture"),
        ("accelcheck curve --device=cuda --counts=1,10,30", "three points of it on a GPU"),
    )
    curve.set_defaults(run=_curve)


def _curve(given: argparse.Namespace) -> int:
    chosen = counts(given.counts)
    if not usable(given.device):
        return NOTHING
    drawable = report.available()
    if given.plot and not drawable.ok:
        print(f"accelcheck: no plot: {drawable}; measuring continues", file=sys.stderr)
    results.writable(given.plot, given.json)
    measured = _measured(given, chosen, draw=bool(given.plot) and drawable.ok)
    if not any(isinstance(point, Point) for point in measured):
        return NOTHING
    return RED if given.plot and not drawable.ok else GREEN


def _measured(given: argparse.Namespace, chosen: tuple[int, ...], *, draw: bool) -> list[Any]:
    # torch reads this at import. These graphs have one kernel each, so a pool of compiling processes does not help.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    from accelcheck.experiments import curve

    device = registered.device(given.device)
    device.open()
    fingerprint = device.fingerprint()
    title = results.identity(fingerprint)
    console.show([title])
    started = time.monotonic()
    points = []
    with console.progress("points", len(chosen) * len(Shapes) * len(Form)) as done:
        for point in curve.measure(device, chosen):
            points.append(point)
            done(f"{point.count} statements, {point.shapes} shapes, {point.form}", 1)
    limit = curve.recompile_limit()
    console.show([*report.text(points, limit), f"{time.monotonic() - started:.0f} s"])
    if given.json is not None:
        results.write(given.json, KIND, fingerprint, report.as_json(points, limit))
    if draw:
        report.draw(given.plot, points, title)
    return points


def counts(text: str) -> tuple[int, ...]:
    """Parses a comma-separated list of numbers of statements, from 1 to `MOST`, sorted without duplicates."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= MOST):
            raise unknown("number of statements", word, [f"whole numbers from 1 to {MOST}, separated by commas"])
    return tuple(sorted({int(word) for word in words}))
