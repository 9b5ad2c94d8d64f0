"""``accelcheck report``: writes files for people and programs from journals alone. No torch."""

import argparse
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, add_many, refuse
from accelcheck.commands.parsing import examples
from accelcheck.report import results
from accelcheck.report.run import DeviceRun, load

FORMATS = {
    "html": "one HTML file for people: verdict, causes, matrix, a page for each case; opens without a network",
    "markdown": "a summary for a pull request",
    "ctrf": "JSON of the Common Test Report Format",
    "ocptv": "JSON lines of OCP's test and validation format",
}
"""Help of each format, by option. All but HTML are texts that a module of `accelcheck.report` makes."""


def add(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="an HTML page and other files from journals",
        description="Makes reports from journals (--accel-journal). Journals of one device, such as those of shards, "
        "become one; several devices stand beside each other. Runs nothing, and needs no torch and no device.",
    )
    report.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, also merged ones")
    for name, text in FORMATS.items():
        options = ("-o", "--html") if name == "html" else (f"--{name}",)
        report.add_argument(*options, type=Path, metavar="FILE", help=f"write {text}")
    for name in ("curve", "claims"):
        meaning = f"a result of `accelcheck {name} --json`, for the HTML page; repeatable"
        add_many(report, f"--{name}", "FILE", meaning, type=Path)
    examples(
        report,
        ("accelcheck report journal.jsonl journal-speed.jsonl -o report.html", "a page for people"),
        ("accelcheck report journal.jsonl --markdown summary.md", "for a pull request"),
        ("accelcheck report journal.jsonl --ctrf ctrf.json --ocptv ocptv.jsonl", "for other tools"),
    )
    report.set_defaults(run=_report)


def _report(given: argparse.Namespace) -> int:
    asked = {name: path for name in FORMATS if (path := getattr(given, name)) is not None}
    if not asked:
        options = f"at least one of {', '.join(f'--{name} FILE' for name in FORMATS)}; -o FILE is --html FILE"
        return refuse(f"nothing to write: expected {options}")
    results.writable(*asked.values())
    runs = load(given.journals)
    for name, path in asked.items():
        _write(name, path, runs, given)
    for path in asked.values():
        print(f"report: {path}")
    return GREEN


def _write(name: str, path: Path, runs: tuple[DeviceRun, ...], given: argparse.Namespace) -> None:
    from accelcheck.report import ctrf, markdown, ocptv
    from accelcheck.report.html import document, experiments

    if name == "html":
        curves, claims = map(experiments.curve, given.curve), map(experiments.claims, given.claims)
        document.write(path, runs, [*curves], [*claims])
    else:
        text_of = {"markdown": markdown.page, "ctrf": ctrf.document, "ocptv": ocptv.document}
        results.save(path, text_of[name](runs))
