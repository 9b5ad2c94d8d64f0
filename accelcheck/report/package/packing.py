"""Packs journals, the ledgers and must-pass lists that they name by hash, and files that people add. No torch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import accelcheck
from accelcheck.core import bounded
from accelcheck.core.errors import InputError
from accelcheck.core.files import replacing
from accelcheck.expectations import ledger as ledgers
from accelcheck.expectations import must_pass
from accelcheck.report.package import archive, chain, contents, manifest, signing

MOST_LEDGER = 16 * bounded.MIB
"""Most bytes of a ledger."""
_UNFIT = re.compile(r"[^A-Za-z0-9._+-]+")


class PackError(InputError):
    """A package cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a member: a file, or bytes that were made here."""

    size: int
    sha256: str
    source: Path | bytes

    @classmethod
    def of(cls, content: bytes) -> Content:
        """Hash bytes that were made here."""
        return cls(len(content), hashlib.sha256(content).hexdigest(), content)

    def chunks(self) -> Iterator[bytes]:
        """Read the content; a `PackError` where the file has changed since its hash was computed."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        digest = hashlib.sha256()
        with bounded.opened(self.source, archive.MOST_MEMBER) as file:
            while chunk := file.read(bounded.MIB):
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != self.sha256:
            raise PackError(f"{self.source}: changed while it was packed: pack again when the run has ended")


@dataclass(frozen=True, slots=True)
class PackResult:
    """The manifest, its SHA-256, which covers the whole package, and remarks: files given twice, missing ledgers."""

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
        journals: Journals of the runs; merged ones too.
        output: Path of the package.
        ledger: Files that may be ledgers and lists of the runs, besides those of `_candidates`.
        logs: Files for the folder ``logs``.
        files: Files for the folder ``files``, such as the answers of an assessment.
        key: Secret key that signs the manifest.
        allow_missing: True to make a package although ledgers are missing; it names them.

    Raises:
        JournalError: A journal is malformed.
        PackError: A file cannot be read, a ledger is not there, or `output` cannot be written.
        SigningError: The manifest cannot be signed.
    """
    for path in (*journals, *ledger, *logs, *files):
        if output.exists() and path.exists() and output.samefile(path):
            raise PackError(f"{output} is one of the files that are packed: give -o another file")
    try:
        members, listed, headers, notes = _journals(journals)
        devices = {name for header in headers for name in header.fields.must_pass}
        judged_by, missing = _found(contents.used(headers), [*ledger, *_candidates(journals, devices)], given=ledger)
        if missing and not allow_missing:
            raise PackError("; ".join(missing) + "; give the file with --ledger, or --allow-missing to pack without it")
        if not all(header.names_ledgers for header in headers):
            notes.append("a journal of an earlier accelcheck does not name its ledgers: none is packed for it")
        members |= judged_by
        for folder, given in (("logs", logs), ("files", files)):
            members |= _added(folder, given, notes)
        members = dict(sorted(members.items()))
        made = manifest.Manifest(
            schema=manifest.SCHEMA,
            accelcheck=accelcheck.__version__,
            journals=tuple(listed),
            members=tuple(manifest.ListedMember(name, m.size, m.sha256) for name, m in members.items()),
            missing=tuple(line.partition(": ")[0] for line in missing),  # without the files of this machine
        )
        raw = manifest.encode(made)
        manifest.decode(raw)  # refuses a package that could not be read back
        first = {manifest.NAME: raw}
        first |= {manifest.SIGNATURE: signing.sign(raw, key)} if key is not None else {}
        first |= {manifest.DIGEST: manifest.digest(raw)}
        _write(output, {name: Content.of(content) for name, content in first.items()} | members)
    except (bounded.UnreadableFileError, manifest.ManifestError) as error:
        raise PackError(str(error)) from error
    return PackResult(made, hashlib.sha256(raw).hexdigest(), (*notes, *missing))


def _write(output: Path, members: Mapping[str, Content]) -> None:
    size = sum(content.size + 2 * archive.BLOCK for content in members.values())
    if size > archive.MOST_FILE or len(members) > archive.MOST_MEMBERS:
        raise PackError(
            f"{output}: {len(members):,} members with {size:,} bytes; a package has at most {archive.MOST_MEMBERS:,} "
            f"and {archive.MOST_FILE:,} bytes"
        )
    try:
        with replacing(output) as file:
            archive.write(file, ((name, content.size, content.chunks()) for name, content in members.items()))
    except OSError as error:
        raise PackError(f"{output} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise error if isinstance(error, (PackError, bounded.UnreadableFileError)) else PackError(str(error)) from error


def _journals(
    paths: Sequence[Path],
) -> tuple[dict[str, Content], list[manifest.ListedJournal], list[contents.RunHeader], list[str]]:
    """Make members of the journals and their chains; also the manifest's list of them, their headers, and remarks."""
    notes: list[str] = []
    read: dict[str, tuple[tuple[object, ...], Path, Content, list[contents.RunHeader]]] = {}
    for path in paths:
        content = _file(path)
        if content.sha256 in read:
            notes.append(f"{path}: taken once: the same as {read[content.sha256][1]}")
            continue
        headers = contents.headers(path)
        first = headers[0].fields
        read[content.sha256] = (sorted(first.devices), first.started, content.sha256), path, content, headers
    members: dict[str, Content] = {}
    listed: list[manifest.ListedJournal] = []
    by_name: dict[str, list[contents.RunHeader]] = {}
    for number, (_, path, content, headers) in enumerate(sorted(read.values(), key=lambda entry: entry[0]), start=1):
        name, chained = f"journals/{number:03}.jsonl", f"chains/{number:03}.jsonl"
        links = [*chain.links(path)]
        members[name], members[chained] = content, Content.of(b"".join(map(chain.encode, links)))
        listed.append(manifest.ListedJournal(name, len(links), links[-1][0], chained))
        by_name[name] = headers
    members[manifest.DEVICES] = Content.of(contents.devices(by_name.items()))
    return members, listed, [header for headers in by_name.values() for header in headers], notes


def _candidates(journals: Sequence[Path], devices: Iterable[str]) -> list[Path]:
    """Files that may be the ledgers and lists: accelcheck's, the devices', those beside the journals or here."""
    lists = Path(must_pass.__file__).parent / must_pass.FOLDER
    folders = dict.fromkeys((ledgers.FOLDER, lists, *(path.parent for path in journals), Path()))
    kinds = (".toml", must_pass.SUFFIX)
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in kinds and path.is_file()]
    lists_of_packages = (path for name in sorted(devices) if (path := must_pass.shipped(name)) is not None)
    return [*files, *ledgers.shipped(tuple(sorted(devices))), *lists_of_packages]


def _found(
    wanted: Iterable[contents.UsedFile], candidates: Iterable[Path], given: Sequence[Path]
) -> tuple[dict[str, Content], list[str]]:
    """Find ledgers and lists by their hash, as members; also a line for each missing one."""
    by_hash: dict[str, Content] = {}
    named: dict[str, str] = {}
    for path in candidates:
        try:
            raw = bounded.read(path, MOST_LEDGER)
        except bounded.UnreadableFileError:
            if path in given:
                raise
            continue
        content = Content.of(raw)
        by_hash.setdefault(content.sha256, content)
        named.setdefault(path.name, f"{path} has the SHA-256 {content.sha256} now")
    members, missing = {}, []
    for used in wanted:
        if used.sha256 in by_hash:
            members[f"{used.folder}/{used.sha256[:12]}-{_fit(used.name)}"] = by_hash[used.sha256]
        else:
            missing.append(f"{used}: {named.get(used.name, 'there is no such file')}")
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
    """Make a legal name of a member; long ones lose their beginning, since the end is more telling."""
    return _UNFIT.sub("_", name)[-(archive.LONGEST_NAME - 30) :]


def _file(path: Path) -> Content:
    with bounded.opened(path, archive.MOST_MEMBER) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is buffered
        return Content(file.tell(), digest, path)
