"""Verifies a package, which is untrusted input: its bytes, and whether its runs qualify. Writes nothing. No torch."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelcheck.core import bounded
from accelcheck.core.bounded import Piece
from accelcheck.core.journal import JournalError
from accelcheck.core.plain import text
from accelcheck.expectations import must_pass
from accelcheck.report.package import archive, chain, contents, manifest, signing
from accelcheck.report.qualification import Qualification, qualification
from accelcheck.report.run import DeviceRun, load

UNSIGNED = "none: whoever has the package could have changed it and computed all hashes anew"
MOST_SAID = 100
"""Most alterations that are named."""


@dataclass
class Verified:
    """The result of a verification.

    Attributes:
        digest: SHA-256 of its manifest; empty where that cannot be read.
        altered: Lines about altered, missing and foreign parts.
        notes: Remarks for the reader that are no alterations.
        signature: State of the signature, in words.
        runs: Devices and their records; empty where the journals cannot be read.
        qualifications: Qualification of each run at its level by this accelcheck's list; the package's is untrusted.
    """

    path: Path
    digest: str = ""
    altered: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signature: str = UNSIGNED
    runs: tuple[DeviceRun, ...] = ()
    members: int = 0
    qualifications: tuple[Qualification, ...] = ()

    @property
    def intact(self) -> bool:
        """True if no alteration was found."""
        return not self.altered

    @property
    def qualifies(self) -> bool:
        """True if all runs, at least one, qualify at their levels."""
        return bool(self.qualifications) and all(qualified.holds for qualified in self.qualifications)


def verify(path: Path, key: Path | None = None) -> Verified:
    """Check a package, which is read in place and within bounds, and the signature of `key` if one is given.

    Raises:
        NotPackageError: The file is none.
        SigningError: The key cannot be read, or py-minisign is not installed.
    """
    public = None if key is None else signing.public_key(key)
    first = archive.first(path, manifest.NAME)
    verified = Verified(path)
    try:
        _verify(verified, first.piece, public)
    except bounded.UnreadableFileError as error:
        verified.altered.append(str(error))
    more = len(verified.altered) - MOST_SAID
    if more > 0:
        verified.altered[MOST_SAID:] = [f"and {more:,} more"]
    return verified


def _verify(verified: Verified, first: Piece, key: Any) -> None:
    raw = bounded.read(first, manifest.MOST)
    verified.digest = hashlib.sha256(raw).hexdigest()
    try:
        listed = manifest.decode(raw)
    except manifest.ManifestError as error:
        verified.altered.append(f"{manifest.NAME}: {error}")
        verified.signature = "not checked: the manifest cannot be read"
        return
    pieces = _pieces(verified, listed, raw)
    _signed(verified, raw, pieces, key)
    if manifest.DIGEST in pieces and bounded.read(pieces[manifest.DIGEST], archive.BLOCK) != manifest.digest(raw):
        verified.altered.append(f"{manifest.NAME}: altered, or its digest {manifest.DIGEST}")
    for member in listed.members:
        if member.name in pieces and _hash(pieces[member.name]) != member.sha256:
            verified.altered.append(f"{member.name}: altered: its SHA-256 is not that of the manifest")
    verified.members = len(listed.members)
    verified.notes += listed.missing
    _chained(verified, listed, pieces)
    _read(verified, listed, pieces)


def _pieces(verified: Verified, listed: manifest.Manifest, raw: bytes) -> dict[str, Piece]:
    """Find the members by name, and note those that are missing, put in, there twice or out of place."""
    signed = (member.piece.size for member in archive.walk(verified.path, {}) if member.name == manifest.SIGNATURE)
    expected = manifest.places(listed, raw, next(signed, None))
    pieces: dict[str, Piece] = {}
    for member in archive.walk(verified.path, expected):
        if member.problem:
            verified.altered.append(f"{member.name}: {member.problem}" if member.name else member.problem)
        if member.name in pieces:
            verified.altered.append(f"{member.name}: is in the archive twice")
        elif member.name:
            pieces[member.name] = member.piece
    wanted = dict(expected.values())
    verified.altered += [f"{name}: missing" for name in wanted if name not in pieces]
    verified.altered += [f"{name}: put in: the manifest does not list it" for name in pieces if name not in wanted]
    verified.altered += [
        f"{name}: altered: it has {piece.size:,} bytes, and the manifest says {wanted[name]:,}"
        for name, piece in pieces.items()
        if name in wanted and piece.size != wanted[name]
    ]
    if not verified.altered and list(pieces) != list(wanted):
        verified.altered.append("the members are not in their order")
    return pieces


def _signed(verified: Verified, raw: bytes, pieces: dict[str, Piece], key: Any) -> None:
    piece = pieces.get(manifest.SIGNATURE)
    if piece is None:
        if key is not None:
            verified.altered.append(f"{manifest.SIGNATURE}: missing: the package is not signed, and a key was given")
        return
    if key is None:
        verified.signature = "not checked: give the signer's public key with --key"
        return
    problem = signing.check(raw, bounded.read(piece, signing.MOST), key)
    verified.signature = f"does not hold: {problem}" if problem else f"holds, by the key {key.to_base64().decode()}"
    if problem:
        verified.altered.append(f"{manifest.SIGNATURE}: does not hold: {problem}")


def _chained(verified: Verified, listed: manifest.Manifest, pieces: dict[str, Piece]) -> None:
    for journal in listed.journals:
        if journal.name not in pieces or journal.chain not in pieces:
            continue
        differing, count, head = chain.differences(pieces[journal.name], pieces[journal.chain])
        verified.altered += differing
        if not differing and (count, head) != (journal.lines, journal.head):
            verified.altered.append(
                f"{journal.name}: its chain ends at line {count} with {head}; "
                f"the manifest says line {journal.lines} and {journal.head}"
            )


def _read(verified: Verified, listed: manifest.Manifest, pieces: dict[str, Piece]) -> None:
    """Read the runs, and compare the other members with their headers."""
    journals = [(journal.name, pieces[journal.name]) for journal in listed.journals if journal.name in pieces]
    try:
        by_journal = [(name, contents.headers(piece)) for name, piece in journals]
        verified.runs = load([piece for _, piece in journals])
    except JournalError as error:
        verified.altered.append(f"cannot be read: {text(error, 500)}")
        return
    if not journals:
        verified.altered.append("there is no journal in it")
    made = contents.devices(by_journal)
    devices = pieces.get(manifest.DEVICES)
    if devices is None or bounded.read(devices, archive.MOST_MEMBER) != made:
        verified.altered.append(f"{manifest.DEVICES}: does not say what the headers of the journals say")
    packed = {(member.name.partition("/")[0], member.sha256) for member in listed.members}
    headers = [header for _, parsed in by_journal for header in parsed]
    verified.altered += [
        f"{used}: missing"
        for used in contents.used(headers)
        if (used.folder, used.sha256) not in packed and str(used) not in listed.missing  # as pack noted
    ]
    verified.qualifications = tuple(map(qualification, verified.runs))
    for header in headers:
        for device, used_list in header.fields.must_pass.items():
            own = must_pass.of(device)
            if used_list.sha256 != own.digest:
                verified.notes.append(
                    f"{text(device, 100)}: the run named version {used_list.version} of the must-pass list "
                    f"{text(used_list.kind, 100)}; this accelcheck holds it against its own, "
                    f"version {own.version} of {own.kind}"
                )
    verified.notes = list(dict.fromkeys(verified.notes))


def _hash(piece: Piece) -> str:
    with bounded.opened(piece, archive.MOST_MEMBER) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it is buffered
