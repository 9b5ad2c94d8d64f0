"""``accelcheck merge``: shards of one run, and runs of several machines, in one journal. No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, RED, USAGE

if TYPE_CHECKING:
    import argparse

EXAMPLES = """examples:
  accelcheck merge shard-1.jsonl shard-2.jsonl -o whole.jsonl
  accelcheck merge --same-device shard-*.jsonl -o whole.jsonl
  accelcheck merge cpu.jsonl xla.jsonl -o both.jsonl

exit codes: 0 merged; 1 the journals are not of the same device, with --same-device; 4 a journal cannot be read"""


def add(commands: Any) -> None:
    """Declare the command."""
    import argparse

    merge = commands.add_parser(
        "merge",
        help="write several journals into one",
        description="Writes the runs of several journals into one journal, which reports read as they read each of them. Runs of one "
        "device with the same versions count as one run; others are kept apart, and what differs is printed. The order of the journals "
        "does not matter.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merge.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, merged ones too")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="journal to write")
    merge.add_argument(
        "--same-device",
        action="store_true",
        help="refuse journals of other devices, fingerprints or versions than the first one's",
    )
    merge.set_defaults(run=_merge)


def _merge(given: argparse.Namespace) -> int:
    from accelcheck.core.journal import JournalError
    from accelcheck.report import console, merging

    try:
        merged = merging.merge(given.journals, given.output, same_device=given.same_device)
    except merging.DifferentDevicesError as error:
        console.show([f"accelcheck: {error}"], sys.stderr)
        return RED
    except JournalError as error:
        console.show([f"accelcheck: {error}"], sys.stderr)
        return USAGE
    runs = [f"  {', '.join(sorted(part.identities)) or 'no device'}: {part.name}" for part in merged.parts]
    console.show([*merged.notes])
    console.show([f"{given.output}: {len(runs)} runs, {merged.cases:,} cases", *runs])
    return GREEN


COMMANDS = (add,)
