"""``accelcheck verify``: checks that a package is unaltered, and that its runs qualify. Extracts nothing. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, RED
from accelcheck.commands.parsing import examples

if TYPE_CHECKING:
    from accelcheck.report.package.verifying import Verified


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check a package: what was altered or is missing, who signed it, whether it qualifies",
        description="Checks every hash of a package, names the records that were altered, removed or put in, checks "
        "the signature, and says whether the runs qualify at their level. Reads within bounds, and writes nothing. "
        "Exits with 0 if the package is as it was packed and qualifies, with 1 if not, and with 4 if it is no package.",
    )
    verify.add_argument("package", type=Path, metavar="FILE", help="package, as accelcheck pack writes it")
    verify.add_argument("--key", type=Path, metavar="PUB", help="public key of minisign that must have signed it")
    examples(
        verify,
        ("accelcheck verify device.accelpack", "what was altered, and whether it qualifies"),
        ("accelcheck verify device.accelpack --key vendor.pub", "and whether its vendor signed it"),
    )
    verify.set_defaults(run=_verify)


def _verify(given: argparse.Namespace) -> int:
    from accelcheck.report import console
    from accelcheck.report.package import verifying

    verified = verifying.verify(given.package, given.key)
    console.show(_lines(verified))
    return GREEN if verified.intact and verified.qualifies else RED


def _lines(verified: Verified) -> Iterator[str]:
    from accelcheck.report.run import labels

    state = "as it was packed" if verified.intact else "ALTERED"
    yield f"{verified.path}: {state}; {verified.members} members"
    yield from (f"  {line}" for line in verified.altered)
    yield f"signature: {verified.signature}"
    yield f"SHA-256 of the manifest: {verified.digest}"
    yield from verified.notes
    for label, run, held in zip(labels(verified.runs), verified.runs, verified.qualifications, strict=True):
        counts = ", ".join(f"{count} {verdict}" for verdict, count in run.counts().items())
        yield f"{label}: {counts or 'no case'}"
        yield f"  {held}"
        yield from (f"    {reason}" for reason in held.reasons)
        yield from (f"  {remark}" for remark in run.remarks)
    if not verified.intact:
        yield "What was altered proves nothing."
