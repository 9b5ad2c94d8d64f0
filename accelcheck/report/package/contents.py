"""Reads the headers of a package's journals: devices, packages, and the files that judged the runs. No torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec

from accelcheck.core.bounded import Source
from accelcheck.core.journal import JournalError
from accelcheck.core.journal_reading import lines, outline, table
from accelcheck.core.plain import text
from accelcheck.devices.base import Fingerprint
from accelcheck.expectations import must_pass
from accelcheck.report.run import Header, read_header

MOST_HEADERS = 20_000
"""Most headers kept of a journal."""


class RunHeader(NamedTuple):
    """The header of a run; those of earlier versions do not name the ledgers."""

    fields: Header
    fingerprints: Mapping[str, Fingerprint | None]
    names_ledgers: bool


def headers(journal: Source) -> list[RunHeader]:
    """Check a journal's lines, and parse its headers; a `JournalError` where it is malformed, or has no whole line."""
    parsed: list[RunHeader] = []
    for line in lines(journal, outlined=True):
        if line.kind == "case":
            outline(line)
            continue
        fields = table(line)
        if line.kind == "run" and len(parsed) < MOST_HEADERS:
            parsed.append(RunHeader(*read_header(line.where, fields), "ledgers" in fields))
    if not parsed:
        raise JournalError(f"{journal}: expected a journal, got a file without a whole line")
    return parsed


def devices(journals: Iterable[tuple[str, Sequence[RunHeader]]]) -> bytes:
    """Encode the member `accelcheck.report.package.manifest.DEVICES` from each journal's name and headers."""
    runs: list[dict[str, Any]] = [
        {
            "journal": name,
            **{field: getattr(header, field) for field in ("started", "accelcheck", "python", "platform", "level")},
            "devices": {device: asdict(known) if known is not None else None for device, known in fingerprints.items()},
            "packages": header.packages,
            "ledgers": msgspec.to_builtins(header.ledgers),
            "must_pass": msgspec.to_builtins(header.must_pass),
        }
        for name, parsed in journals
        for header, fingerprints, _ in parsed
    ]
    return (json.dumps({"runs": runs}, indent=1, sort_keys=True) + "\n").encode("ascii")


@dataclass(frozen=True, order=True)
class UsedFile:
    """A file that judged runs, and its folder in the package: ``ledgers`` or ``must-pass``."""

    folder: str
    name: str
    sha256: str

    def __str__(self) -> str:
        kind = "ledger" if self.folder == "ledgers" else "must-pass list"
        return f"{kind} {text(self.name, 100)}, which a run used with the SHA-256 {text(self.sha256, 64)}"


def used(parsed: Iterable[RunHeader]) -> list[UsedFile]:
    """List the files that judged runs, each once, sorted."""
    files = set[UsedFile]()
    for header, _, _ in parsed:
        files |= {UsedFile("ledgers", ledger.name, ledger.sha256) for ledger in header.ledgers}
        lists = header.must_pass.values()
        files |= {UsedFile("must-pass", required.kind + must_pass.SUFFIX, required.sha256) for required in lists}
    return sorted(files)
