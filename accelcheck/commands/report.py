"""``accelcheck report``: writes files for people and programs from journals alone. No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, USAGE, add_many
from accelcheck.commands.parsing import examples
from accelcheck.core.journal import JournalError
from accelcheck.report import results

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from accelcheck.report.run import DeviceRun

FORMATS = {
    "html": ("-o", "one HTML file for people: verdict, causes, matrix, a page for each case; opens without a network"),
    "markdown": ("", "a summary for a pull request"),
    "ctrf": ("", "JSON of the Common Test Report Format"),
    "ocptv": ("", "JSON lines of OCP's test and validation format"),
}
"""Short option and help of each format, by long option."""


def add(commands: Any) -> None:
    """Declares the command."""
    report = commands.add_parser(
        "report",
        help="an HTML page and other files from journals",
        description="Makes reports from journals (--accel-journal). Journals of one device, such as those of shards, "
        "become one; several devices stand beside each other. Runs nothing, and needs no torch and no device.",
    )
    report.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, also merged ones")
    for name, (short, text) in FORMATS.items():
        report.add_argument(*filter(None, (short, f"--{name}")), type=Path, metavar="FILE", help=f"write {text}")
    add_many(
        report, "--curve", "FILE", "a result of `accelcheck curve --json`, for the HTML page; repeatable", type=Path
    )
    add_many(
        report, "--claims", "FILE", "a result of `accelcheck claims --json`, for the HTML page; repeatable", type=Path
    )
    examples(
        report,
        ("accelcheck report journal.jsonl journal-speed.jsonl -o report.html", "a page for people"),
        ("accelcheck report journal.jsonl --markdown summary.md", "for a pull request"),
        ("accelcheck report journal.jsonl --ctrf ctrf.json --ocptv ocptv.jsonl", "for other tools"),
    )
    report.set_defaults(run=_report)


def _report(given: argparse.Namespace) -> int:
    from accelcheck.report.html.experiments import ResultFileError
    from accelcheck.report.run import load

    asked = {name: path for name in FORMATS if (path := getattr(given, name)) is not None}
    if not asked:
        options = ", ".join(f"--{name} FILE" for name in FORMATS)
        print(
            f"accelcheck: nothing to write: expected at least one of {options}; -o FILE is --html FILE", file=sys.stderr
        )
        return USAGE
    try:
        for path in asked.values():
            results.writable(path)
        runs = load(given.journals)
        for name, path in asked.items():
            _WRITERS[name](path, runs, given)
    except (JournalError, ResultFileError, results.ResultsError) as error:
        print(f"accelcheck: {error}", file=sys.stderr)
        return USAGE
    for path in asked.values():
        print(f"report: {path}")
    return GREEN


def _html(path: Path, runs: tuple[DeviceRun, ...], given: argparse.Namespace) -> None:
    from accelcheck.report.html import document, experiments

    curves = [experiments.curve(file) for file in given.curve]
    claims = [experiments.claims(file) for file in given.claims]
    document.write(path, runs, curves, claims)


def _markdown(path: Path, runs: tuple[DeviceRun, ...], _: argparse.Namespace) -> None:
    from accelcheck.report import markdown

    results.save(path, markdown.page(runs))


def _ctrf(path: Path, runs: tuple[DeviceRun, ...], _: argparse.Namespace) -> None:
    from accelcheck.report import ctrf

    results.save(path, ctrf.document(runs))


def _ocptv(path: Path, runs: tuple[DeviceRun, ...], _: argparse.Namespace) -> None:
    from accelcheck.report import ocptv

    results.save(path, ocptv.document(runs))


_WRITERS: Mapping[str, Any] = {"html": _html, "markdown": _markdown, "ctrf": _ctrf, "ocptv": _ocptv}
COMMANDS = (add,)
