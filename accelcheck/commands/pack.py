"""``accelcheck pack``: writes journals and all inputs of their verdicts to one tamper-evident file. No torch."""

import argparse
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, add_many
from accelcheck.commands.parsing import examples


def add(commands: Any) -> None:
    pack = commands.add_parser(
        "pack",
        help="put journals, ledgers and logs into one package that can be verified",
        description="Writes journals, the ledgers that they were judged by, fingerprints, installed packages and "
        "given files into one archive with the SHA-256 of each and a hash chain of all records. The same input gives "
        "the same bytes. `accelcheck verify` reads it. Exits with 0, and with 4 if a file cannot be read, is missing, "
        "or is no journal.",
    )
    pack.add_argument("journals", nargs="+", type=Path, metavar="JOURNAL", help="journals, merged ones too")
    pack.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="package to write")
    own = "accelcheck's own, and those beside the journals and in this folder, are found by hash"
    add_many(pack, "--ledger", "FILE", f"ledger that a run used; repeatable. {own}", type=Path)
    add_many(pack, "--log", "FILE", "log to pack; repeatable", type=Path)
    add_many(pack, "--file", "FILE", "other file to pack, such as the answers of an assessment; repeatable", type=Path)
    pack.add_argument("--sign", type=Path, metavar="KEY", help="sign with this secret key of minisign")
    meaning = "pack although a ledger that a run used is not there"
    pack.add_argument("--allow-missing", action="store_true", help=meaning)
    examples(
        pack,
        ("accelcheck pack journal.jsonl -o device.accelpack", "a run, with its ledgers and must-pass lists"),
        ("accelcheck pack cpu.jsonl xla.jsonl --log build.log -o machine.accelpack", "several runs, with a log"),
        ("accelcheck pack journal.jsonl --sign minisign.key -o device.accelpack", "signed"),
    )
    pack.set_defaults(run=_pack)


def _pack(given: argparse.Namespace) -> int:
    from accelcheck.report import console
    from accelcheck.report.package import packing

    packed = packing.pack(
        given.journals,
        given.output,
        ledger=given.ledger,
        logs=given.log,
        files=given.file,
        key=given.sign,
        allow_missing=given.allow_missing,
    )
    records = sum(journal.lines for journal in packed.manifest.journals)
    signed = f"signed with {given.sign}" if given.sign else "not signed: give --sign KEY so that changes can be found"
    members = packed.manifest.members
    tally = f"{len(packed.manifest.journals)} journals with {records:,} lines, {len(members)} members"
    listed = (f"  {member.size:>12,} B  {member.name}" for member in members)
    digest = f"SHA-256 of the manifest: {packed.digest}"
    console.show([*packed.notes, f"{given.output}: {tally}", *listed, digest, signed])
    return GREEN
