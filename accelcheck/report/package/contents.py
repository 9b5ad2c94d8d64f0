"""What the journals of a package say of their runs: devices, installed packages and the ledgers that they were judged by. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accelcheck.core.journal_reading import lines, table
from accelcheck.report.run import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.core.bounded import Source
    from accelcheck.report.run import UsedLedger

MOST_HEADERS = 20_000
"""Runs in a journal of which the contents are told."""


def headers(journal: Source) -> list[tuple[str, Mapping[str, Any]]]:
    """The headers of a journal, each with the place where it stands.

    Raises:
        JournalError: The journal is malformed.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    for line in lines(journal):
        if line.kind == "run" and len(found) < MOST_HEADERS:
            fields = table(line)
            read_header(line.where, fields)
            found.append((line.where, fields))
    return found


def devices(journals: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> bytes:
    """The member `accelcheck.report.package.manifest.DEVICES`.

    Args:
        journals: Name of each journal in the package, with the headers of its runs.
    """
    runs = []
    for name, found in journals:
        for fields in found:
            header, fingerprints = read_header(name, fields)
            runs.append(
                {
                    "journal": name,
                    "started": header.started,
                    "accelcheck": header.accelcheck,
                    "python": header.python,
                    "platform": header.platform,
                    "level": header.level,
                    "devices": {key: None if one is None else asdict(one) for key, one in fingerprints.items()},
                    "packages": header.packages,
                    "ledgers": [{"name": used.name, "sha256": used.sha256} for used in header.ledgers],
                }
            )
    return (json.dumps({"runs": runs}, indent=1, sort_keys=True) + "\n").encode("ascii")


def used(found: Iterable[Mapping[str, Any]]) -> list[UsedLedger]:
    """The ledgers that runs used, each once, in the order of their names."""
    ledgers = {ledger for fields in found for ledger in read_header("", fields)[0].ledgers}
    return sorted(ledgers, key=lambda ledger: (ledger.name, ledger.sha256))
