"""Makes a package of journals, of the ledgers and must-pass lists that they name by hash, and of files that people add. No torch."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelcheck
from accelcheck.core import bounded
from accelcheck.core.files import replacing
from accelcheck.core.journal import JournalError
from accelcheck.core.journal_reading import lines, outline, table
from accelcheck.expectations import ledger as ledgers
from accelcheck.expectations import must_pass
from accelcheck.report.package import archive, chain, contents, manifest, signing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MOST_LEDGER = 16 * bounded.MIB
"""Bytes of a ledger."""
_UNFIT = re.compile(r"[^A-Za-z0-9._+-]+")


class PackError(ValueError):
    """A package cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Content:
    """A member that is to be written: a file, or bytes that were made here."""

    size: int
    sha256: str
    source: Path | bytes

    @classmethod
    def of(cls, content: bytes) -> Content:
        """Of bytes that were made here."""
        return cls(len(content), hashlib.sha256(content).hexdigest(), content)

    def chunks(self) -> Iterator[bytes]:
        """Its bytes.

        Raises:
            PackError: The file has changed since its hash was computed.
        """
        if isinstance(self.source, bytes):
            yield self.source
            return
        found = hashlib.sha256()
        for chunk in bounded.chunks(self.source, archive.MOST_MEMBER):
            found.update(chunk)
            yield chunk
        if found.hexdigest() != self.sha256:
            raise PackError(f"{self.source}: changed while it was packed: pack again when the run has ended")


@dataclass(frozen=True, slots=True)
class PackResult:
    """What was packed.

    Attributes:
        manifest: The list of members.
        digest: SHA-256 of the manifest, which says all of the package.
        notes: What the reader should know: given twice, ledgers that are missing.
    """

    manifest: manifest.Manifest
    digest: str
    notes: tuple[str, ...]


def pack(
    journals: Sequence[Path],
    output: Path,
    *,
    ledger: Sequence[Path] = (),
    logs: Sequence[Path] = (),
    files: Sequence[Path] = (),
    key: Path | None = None,
    allow_missing: bool = False,
) -> PackResult:
    """Write a package; whole or not at all.

    Args:
        journals: Of the runs; merged ones too.
        output: The package.
        ledger: Files among which the ledgers and lists of the runs are looked for, besides accelcheck's own, the folders of the journals and this one.
        logs: Files for the folder ``logs``.
        files: Files for the folder ``files``, such as the answers of an assessment.
        key: Secret key that signs the manifest.
        allow_missing: Make a package although ledgers are missing; it names them.

    Raises:
        JournalError: A journal is malformed.
        PackError: A file cannot be read, a ledger is not there, or `output` cannot be written.
        SigningError: The manifest cannot be signed.
    """
    _not_over(output, [*journals, *ledger, *logs, *files])
    try:
        members, listed, headers, notes = _journals(journals)
        devices = {name for fields in headers for name in contents.devices_of(fields)}
        found, missing = _found(contents.used(headers), [*ledger, *_candidates(journals, devices)], given=ledger)
        if missing and not allow_missing:
            raise PackError("; ".join(missing) + "; give the file with --ledger, or --allow-missing to pack without it")
        if not all("ledgers" in fields for fields in headers):
            notes.append("a journal of an earlier accelcheck does not name its ledgers: none is packed for it")
        members |= found
        for folder, given in (("logs", logs), ("files", files)):
            members |= _added(folder, given, notes)
        raw = manifest.encode(
            manifest.Manifest(
                schema=manifest.SCHEMA,
                accelcheck=accelcheck.__version__,
                journals=tuple(listed),
                members=tuple(
                    manifest.ListedMember(name, one.size, one.sha256) for name, one in sorted(members.items())
                ),
                missing=tuple(
                    line.partition(": ")[0] for line in missing
                ),  # what is on this machine now is not for others
            )
        )
        made = manifest.decode(raw)  # what cannot be read back is not written
        first = {manifest.NAME: raw}
        first |= {manifest.SIGNATURE: signing.sign(raw, key)} if key is not None else {}
        first |= {manifest.DIGEST: manifest.digest(raw)}
        _write(output, {name: Content.of(content) for name, content in first.items()} | dict(sorted(members.items())))
    except (bounded.UnreadableFileError, manifest.ManifestError) as error:
        raise PackError(str(error)) from error
    return PackResult(made, hashlib.sha256(raw).hexdigest(), (*notes, *missing))


def _write(output: Path, members: Mapping[str, Content]) -> None:
    size = sum(one.size + 2 * archive.BLOCK for one in members.values())
    if size > archive.MOST_FILE or len(members) > archive.MOST_MEMBERS:
        raise PackError(
            f"{output}: {len(members):,} members with {size:,} bytes; a package has at most {archive.MOST_MEMBERS:,} "
            f"and {archive.MOST_FILE:,} bytes"
        )
    try:
        with replacing(output) as file:
            archive.write(file, ((name, one.size, one.chunks()) for name, one in members.items()))
    except OSError as error:
        raise PackError(f"{output} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise error if isinstance(error, (PackError, bounded.UnreadableFileError)) else PackError(str(error)) from error


def _not_over(output: Path, sources: Iterable[Path]) -> None:
    for path in sources:
        if output.exists() and path.exists() and output.samefile(path):
            raise PackError(f"{output} is one of the files that are packed: give -o another file")


def _journals(
    paths: Sequence[Path],
) -> tuple[dict[str, Content], list[manifest.ListedJournal], list[Mapping[str, Any]], list[str]]:
    """The journals and their chains as members, what the manifest lists of them, their headers, and remarks."""
    notes: list[str] = []
    read: dict[str, tuple[tuple[object, ...], Path, Content, list[Mapping[str, Any]]]] = {}
    for path in paths:
        content = _file(path)
        if content.sha256 in read:
            notes.append(f"{path}: taken once: the same as {read[content.sha256][1]}")
            continue
        found = _checked(path)
        order = (sorted(found[0].get("devices", {})), str(found[0].get("started", "")), content.sha256)
        read[content.sha256] = (order, path, content, found)
    members: dict[str, Content] = {}
    listed: list[manifest.ListedJournal] = []
    headers: list[Mapping[str, Any]] = []
    told: list[tuple[str, Sequence[Mapping[str, Any]]]] = []
    for number, (_, path, content, found) in enumerate(sorted(read.values(), key=lambda one: one[0]), start=1):
        name, chained = f"journals/{number:03}.jsonl", f"chains/{number:03}.jsonl"
        links = [*chain.links(path)]
        members[name], members[chained] = content, Content.of(b"".join(map(chain.encode, links)))
        listed.append(manifest.ListedJournal(name, len(links), links[-1][0], chained))
        headers += found
        told.append((name, found))
    members[manifest.DEVICES] = Content.of(contents.devices(told))
    return members, listed, headers, notes


def _checked(path: Path) -> list[Mapping[str, Any]]:
    """The headers of a journal of which every line was checked."""
    found = False
    for line in lines(path, outlined=True):
        found = True
        if line.kind == "case":
            outline(line)
        else:
            table(line)
    if not found:
        raise JournalError(f"{path}: expected a journal, got a file without a whole line")
    return [fields for _, fields in contents.headers(path)]


def _candidates(journals: Sequence[Path], devices: Iterable[str]) -> list[Path]:
    """Files that may be the ledgers and lists of runs: accelcheck's own, installed devices', those beside the journals or in this folder."""
    lists = Path(must_pass.__file__).parent / must_pass.FOLDER
    folders = dict.fromkeys((ledgers.FOLDER, lists, *(path.parent for path in journals), Path()))
    kinds = (".toml", must_pass.SUFFIX)
    found = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in kinds and path.is_file()]
    lists_of_packages = (path for name in sorted(devices) if (path := must_pass.shipped(name)) is not None)
    return [*found, *ledgers.shipped(tuple(sorted(devices))), *lists_of_packages]


def _found(
    wanted: Iterable[contents.UsedFile], candidates: Iterable[Path], given: Sequence[Path]
) -> tuple[dict[str, Content], list[str]]:
    """The ledgers and lists as members, found by their hash, and a line for each that is not there."""
    content: dict[str, tuple[str, Content]] = {}
    named: dict[str, str] = {}
    for path in candidates:
        try:
            raw = bounded.read(path, MOST_LEDGER)
        except bounded.UnreadableFileError:
            if path in given:
                raise
            continue
        found = Content.of(raw)
        content.setdefault(found.sha256, (path.name, found))
        named.setdefault(path.name, f"{path} has the SHA-256 {found.sha256} now")
    members, missing = {}, []
    for used in wanted:
        if used.sha256 in content:
            members[f"{used.folder}/{used.sha256[:12]}-{_fit(used.name)}"] = content[used.sha256][1]
        else:
            now = named.get(used.name, "there is no such file")
            missing.append(f"{used}: {now}")
    return members, missing


def _added(folder: str, paths: Sequence[Path], notes: list[str]) -> dict[str, Content]:
    members: dict[str, Content] = {}
    for path in paths:
        content = _file(path)
        name = f"{folder}/{content.sha256[:12]}-{_fit(path.name)}"
        if name in members:
            notes.append(f"{path}: taken once: the same file was given before")
        members[name] = content
    return members


def _fit(name: str) -> str:
    """A name that a member may have; long ones lose their beginning, since the end says what they are."""
    return _UNFIT.sub("_", name)[-(archive.LONGEST_NAME - 30) :]


def _file(path: Path) -> Content:
    found, size = hashlib.sha256(), 0
    for chunk in bounded.chunks(path, archive.MOST_MEMBER):
        found.update(chunk)
        size += len(chunk)
    return Content(size, found.hexdigest(), path)
