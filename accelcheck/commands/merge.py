"""``accelcheck merge``: writes shards of a run, or runs of several machines, to one journal. No torch."""

import argparse
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, RED, refuse
from accelcheck.commands.parsing import examples


def add(commands: Any) -> None:
    merge = commands.add_parser(
        "merge",
        help="write several journals into one",
        description="Writes the runs of several journals into one journal, which reports read as they read each of "
        "them. Runs of one device with the same versions count as one run; others are kept apart, and what differs is "
        "printed. The order of the journals does not matter. Exits with 0, with 1 if --same-device refused, and with "
        "4 if a journal cannot be read.",
    )
    merge.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, merged ones too")
    merge.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="journal to write")
    merge.add_argument(
        "--same-device",
        action="store_true",
        help="refuse journals of other devices, fingerprints or versions than the first one's",
    )
    examples(
        merge,
        ("accelcheck merge shard-1.jsonl shard-2.jsonl -o whole.jsonl", "the shards of a run"),
        ("accelcheck merge --same-device 1.jsonl 2.jsonl -o whole.jsonl", "refused if they are not of one device"),
        ("accelcheck merge cpu.jsonl xla.jsonl -o both.jsonl", "several devices"),
    )
    merge.set_defaults(run=_merge)


def _merge(given: argparse.Namespace) -> int:
    from accelcheck.report import console, merging

    try:
        merged = merging.merge(given.journals, given.output, same_device=given.same_device)
    except merging.DifferentDevicesError as error:
        return refuse(error, RED)
    runs = [f"  {', '.join(sorted(part.identities)) or 'no device'}: {part.name}" for part in merged.parts]
    console.show([*merged.notes, f"{given.output}: {len(runs)} runs, {merged.cases:,} cases", *runs])
    return GREEN
