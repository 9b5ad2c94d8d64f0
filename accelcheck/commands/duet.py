"""``accelcheck duet``: compares the speed of two environments on this machine."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE, add_device, add_many, number, positive, refuse
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core.case import LEVELS
from accelcheck.core.selection import Selection
from accelcheck.experiments.duet import TIMEOUT, DuetCase, Facts, located, medians, run_pairs
from accelcheck.experiments.duet_side import AbsentError, DuetSide, SideError
from accelcheck.measure import duet
from accelcheck.report import console


def add(commands: Any) -> None:
    command = commands.add_parser(
        "duet",
        help="compare two environments (wheels, runtimes, revisions) on this machine",
        description="Measures the same cases in processes of two environments in turns, A B B A, and reports for each "
        "case whether B is faster, the same, slower or undecided. Exits with 1 if B is slower in a case, or fails "
        "where A does not.",
    )
    both = "interpreter of A, then of B; given once, of both (default: this interpreter for both)"
    add_many(command, "--python", "PYTHON", both)
    for side in ("a", "b"):
        meaning = f"environment variable for {side.upper()} only; repeatable"
        add_many(command, f"--env-{side}", "NAME=VALUE", meaning, type=_setting)
    add_device(command, "measure")
    add_many(command, "--technique", "GLOB", "techniques by name; repeatable (default: eager)")
    add_many(command, "--workload", "GLOB", "workloads by name; repeatable (default: all)")
    add_many(command, "--case", "ID", "exact id of a case, of any level; repeatable")
    command.add_argument("--level", type=int, choices=LEVELS, default=1, help="highest level of the cases (default: 1)")
    command.add_argument(
        "--margin",
        type=number(float, lambda value: 0.0 < value < 1.0, "a number between 0 and 1, such as 0.02"),
        default=duet.MARGIN,
        help=f"smallest relative difference that counts (default: {duet.MARGIN:g})",
    )
    command.add_argument(
        "--pairs",
        type=positive,
        default=duet.LOOKS[-1],
        help=f"largest number of pairs of processes, 2 or more (default: {duet.LOOKS[-1]}); cases are decided after "
        f"{duet.LOOKS} pairs",
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="seconds that a process may report nothing, before it is ended after at most twice as many (default: "
        f"{TIMEOUT:g})",
    )
    add_json(command)
    examples(
        command,
        ("accelcheck duet --python=old/bin/python --python=new/bin/python", "two wheels of torch"),
        ("accelcheck duet --env-b=TORCHINDUCTOR_FREEZING=1 --technique='compile-*'", "one variable"),
    )
    command.set_defaults(run=_duet, refuse=command.error)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _duet(given: argparse.Namespace) -> int:
    if len(given.python) > 2 or given.pairs < 2 or not given.timeout > 0:
        expected = "--python at most twice, --pairs of at least 2 and a --timeout above 0"
        return refuse(f"expected {expected}, got {given.python}, {given.pairs} and {given.timeout:g}")
    if not (given.python or given.env_a or given.env_b):
        given.refuse("nothing to compare: name what differs, by --python, --env-a or --env-b")
    words = given.python or [sys.executable]
    techniques = tuple(given.technique) or (() if given.case else ("eager",))
    workloads, cases = tuple(given.workload), tuple(given.case)
    selection = Selection((given.device,), techniques, workloads, cases=cases, level=given.level)
    looks = (*(look for look in duet.LOOKS if look < given.pairs), given.pairs)
    try:
        a, b = (located(word) for word in (words[0], words[-1]))
        sides = DuetSide("A", a, dict(given.env_a)), DuetSide("B", b, dict(given.env_b))
        with _terminable(), console.progress("pairs at most", looks[-1], interval=0.0) as done:
            facts, rows = run_pairs(sides, selection, done, looks, given.margin, given.timeout)
    except SideError as error:
        return refuse(error, NOTHING if isinstance(error, AbsentError) else USAGE)
    if given.json:
        print_json("duet", as_json(sides, facts, rows, given.margin))
    else:
        console.show(report(sides, facts, rows, given.margin))
    if any(row.worse for row in rows):
        return RED
    return GREEN if any(row.found for row in rows) else NOTHING


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end the child processes too; otherwise suspended ones would remain."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(
    sides: Sequence[DuetSide], facts: Sequence[Facts], rows: Sequence[DuetCase], margin: float
) -> Iterator[str | console.Table]:
    """Yields the printed report: the environments, and a row for each case."""
    for side, fact in zip(sides, facts, strict=True):
        settings = "".join(f" {name}={value}" for name, value in side.environ.items())
        yield (
            f"{side.name}: {side.python}{settings}\n"
            f"   python {fact.python}, torch {fact.torch}, accelcheck {fact.accelcheck}, {fact.runtime}"
        )
    yield ""
    head = ("case", "A", "B", "B / A", "interval", "pairs", "of eager: A", "B", "answer")
    yield console.Table(head, [(row.case, *_figures(row)) for row in rows], right=(1, 2, 3, 5, 6, 7))
    yield (
        "\nTimes are the median over processes of the tenth percentile of a process's blocks. B / A is the ratio of "
        f"times: above 1, B is slower. Differences within {margin:.1%} count as the same."
    )


def as_json(
    sides: Sequence[DuetSide], facts: Sequence[Facts], rows: Sequence[DuetCase], margin: float
) -> dict[str, Any]:
    """Returns the report as JSON: times in seconds, ratios of B to A."""
    return {
        "margin": margin,
        "sides": [
            {"name": side.name, "python": str(side.python), "environment": dict(side.environ), "facts": asdict(fact)}
            for side, fact in zip(sides, facts, strict=True)
        ],
        "cases": [
            {
                "case": row.case,
                "absent": dict(row.absent),
                "worse": row.worse,
                **({} if row.found is None else _result(row, row.found)),
            }
            for row in rows
        ],
    }


def _result(row: DuetCase, found: duet.Duet) -> dict[str, Any]:
    seconds = [medians(samples).seconds for samples in row.samples]
    return {**asdict(found), "answer": str(found.answer), "seconds": seconds}


def _figures(row: DuetCase) -> tuple[str, ...]:
    if row.absent or row.found is None:
        reasons = "; ".join(f"{side}: {why}" for side, why in sorted(row.absent.items()))
        return (*["-"] * 7, f"not compared: {reasons}" if reasons else "not compared")
    figures = row.found
    a, b = (medians(samples) for samples in row.samples)
    return (
        _time(a.seconds),
        _time(b.seconds),
        f"{figures.ratio:.3f}",
        f"{_factor(figures.low)} to {_factor(figures.high)}",
        str(figures.pairs),
        f"{a.to_eager:.3f}",
        f"{b.to_eager:.3f}",
        figures.answer,
    )


def _factor(ratio: float) -> str:
    """Formats a ratio; small numbers of pairs may leave an interval of many orders of magnitude."""
    return f"{ratio:.3f}" if ratio < 1000 else f"{ratio:.1e}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"
