"""What the journals of a package say of their runs: devices, installed packages and the ledgers and must-pass lists that they were judged by. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from accelcheck.core.journal_reading import lines, table
from accelcheck.core.plain import text
from accelcheck.expectations import must_pass
from accelcheck.report.run import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.core.bounded import Source

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
                    "ledgers": msgspec.to_builtins(header.ledgers),
                    "must_pass": msgspec.to_builtins(header.must_pass),
                }
            )
    return (json.dumps({"runs": runs}, indent=1, sort_keys=True) + "\n").encode("ascii")


@dataclass(frozen=True, order=True)
class UsedFile:
    """A file that runs were judged by.

    Attributes:
        folder: Of the package: ``ledgers`` or ``must-pass``.
        name: Of the file.
        sha256: Of its content.
    """

    folder: str
    name: str
    sha256: str

    def __str__(self) -> str:
        kind = "ledger" if self.folder == "ledgers" else "must-pass list"
        return f"{kind} {text(self.name, 100)}, which a run used with the SHA-256 {text(self.sha256, 64)}"


def devices_of(fields: Mapping[str, Any]) -> list[str]:
    """The devices that a header asks for."""
    header, _ = read_header("", fields)
    return [*header.must_pass]


def used(found: Iterable[Mapping[str, Any]]) -> list[UsedFile]:
    """The files that runs were judged by, each once, sorted."""
    files = set[UsedFile]()
    for fields in found:
        header, _ = read_header("", fields)
        files |= {UsedFile("ledgers", ledger.name, ledger.sha256) for ledger in header.ledgers}
        files |= {
            UsedFile("must-pass", required.kind + must_pass.SUFFIX, required.sha256)
            for required in header.must_pass.values()
        }
    return sorted(files)
