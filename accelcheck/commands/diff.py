"""``accelcheck diff``: compares two runs by their journals alone. No torch."""

import argparse
import json
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, RED
from accelcheck.commands.parsing import examples
from accelcheck.report import console, results


def add(commands: Any) -> None:
    diff = commands.add_parser(
        "diff",
        help="what is better and worse in one run than in another: verdicts, errors, speed, coverage",
        description="Compares the journals of two runs, each a file; merged journals hold several devices, which are "
        "matched by name. Exits with 1 if something is worse: a verdict, also one that the ledger now expects; a case "
        "that ran and does not run now; an error that is at least twice what it was and larger than eager and all "
        "rounding samples err; a time or a ratio to eager beyond both intervals. Times are compared where the "
        "fingerprints of the devices are the same, and count where no run waited for a core. Across devices only "
        "verdicts count. Exits with 4 if a journal cannot be read, and with 0 otherwise.",
    )
    diff.add_argument("old", type=Path, metavar="OLD", help="journal of the run to compare with")
    diff.add_argument("new", type=Path, metavar="NEW", help="journal of the run that may be worse")
    diff.add_argument(
        "--across",
        action="store_true",
        help="compare different devices by technique, workload, dtype and mode: what is right on one and not on the "
        "other (default: only where no device is in both journals)",
    )
    diff.add_argument("--json", type=Path, metavar="FILE", help="write all changes as JSON")
    diff.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary for a pull request")
    examples(
        diff,
        ("accelcheck diff last.jsonl journal.jsonl", "what is worse than in the last run"),
        ("accelcheck diff cuda.jsonl rocm.jsonl --across", "what is right on one device and not on the other"),
        ("accelcheck diff last.jsonl journal.jsonl --markdown diff.md", "for a pull request"),
    )
    diff.set_defaults(run=_diff)


def _diff(given: argparse.Namespace) -> int:
    from accelcheck.report import difference, difference_text
    from accelcheck.report.run import load

    results.writable(given.json, given.markdown)
    changes = difference.compare(load([given.old]), load([given.new]), across=given.across)
    if given.json is not None:
        results.save(given.json, json.dumps(changes.as_json(), indent=1, sort_keys=True, allow_nan=False) + "\n")
    if given.markdown is not None:
        results.save(given.markdown, difference_text.page(changes))
    console.show(difference_text.terminal(changes))
    return RED if changes.worse else GREEN
