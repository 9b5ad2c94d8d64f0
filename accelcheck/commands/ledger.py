"""``accelcheck ledger``: checks ledgers, and suggests entries for what a run found. The reasons are left to people."""

import argparse
import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_many, refuse
from accelcheck.commands.parsing import examples
from accelcheck.core.case import LEVELS
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.expectations.ledger import FOLDER, Ledger, shipped
from accelcheck.plugin import registered
from accelcheck.report import console
from accelcheck.report.run import DeviceRun, load


def add(commands: Any) -> None:
    ledger = commands.add_parser("ledger", help="known failures: check the files, suggest entries", description=__doc__)
    examples(
        ledger,
        ("accelcheck ledger check known.toml", "exits with 1 if something has to change"),
        ("accelcheck ledger suggest journal.jsonl", "exits with 5 if there is no unexpected failure"),
    )
    actions = ledger.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check",
        help="malformed and expired entries, patterns of no case, overlaps; with journals also what nothing needs",
    )
    check.add_argument("files", nargs="*", type=Path, metavar="FILE", help="ledgers (default: those of accelcheck)")
    meaning = (
        "journal of a run; repeatable: entries that its cases do not show, and sizes far larger than seen, are named"
    )
    add_many(check, "--journal", "FILE", meaning, type=Path)
    examples(
        check,
        ("accelcheck ledger check", "the ledgers of accelcheck"),
        ("accelcheck ledger check known.toml --journal journal.jsonl", "a ledger, beside what a run showed"),
    )
    check.set_defaults(run=_check)
    suggest = actions.add_parser(
        "suggest", help="print entries for the unexpected failures of a run, with a TODO for what only a person knows"
    )
    suggest.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, merged ones too")
    add_many(suggest, "--ledger", "FILE", "ledger that holds already; repeatable", type=Path)
    examples(suggest, ("accelcheck ledger suggest journal.jsonl", "entries to put into a file and to complete"))
    suggest.set_defaults(run=_suggest)


def _check(given: argparse.Namespace) -> int:
    from accelcheck.report import ledger_check

    paths = given.files or sorted(FOLDER.glob("*.toml"))
    runs = load(given.journal)
    config = registered.here()
    names = [*devices(registered.devices(config)), *(run.device for run in runs), *ledger_check.devices(paths)]
    selection = Selection(tuple(sorted(set(names))), level=max(LEVELS))
    ids = {case.id for case in registered.matrix(config).cases(selection)}
    records = [record for run in runs for record in run.records] if given.journal else None
    checked = ledger_check.check(paths, ids, _today(), records)
    tally = f"{len(checked.wrong)} to change, {len(checked.notes)} to look at"
    lines = [*(f"wrong: {line}" for line in checked.wrong), *(f"note: {line}" for line in checked.notes)]
    console.show([*lines, f"{len(paths)} ledgers, {checked.entries} entries: {tally}"])
    return RED if checked.wrong else GREEN


def _suggest(given: argparse.Namespace) -> int:
    from accelcheck.report import ledger_stubs

    runs = load(given.journals)
    ledger = Ledger.load((*shipped(tuple(dict.fromkeys(run.device for run in runs))), *given.ledger))
    lines, count = ledger_stubs.suggest(runs, ledger, _today(), _titles)
    if not count:
        told = [line for line in lines if "no ledger can expect" in line]
        return refuse("\n".join(["no failure that a ledger could expect", *told]), NOTHING)
    console.show(lines)
    entries = "1 entry" if count == 1 else f"{count} entries"
    console.show([f"accelcheck: {entries}; write the reason, the link and the owner of each"], sys.stderr)
    return GREEN


def _titles(runs: Sequence[DeviceRun]) -> Mapping[str, str]:
    """Maps each case that is not green to the title of its cause, of several to that with the most cases."""
    from accelcheck.report.causes import causes

    titles: dict[str, str] = {}
    for cause in causes(runs):
        for _, record in cause.cases:
            titles.setdefault(record.case.id, cause.title)
    return titles


def _today() -> dt.date:
    return dt.datetime.now(tz=dt.UTC).date()
