"""The manifest of a package, as JSON by schema, in one legal spelling, so that any other one is an alteration."""

import hashlib
import json

import msgspec

from accelcheck.core.bounded import MIB
from accelcheck.core.plain import text
from accelcheck.report.package import archive

NAME = "manifest.json"
SIGNATURE = "manifest.json.minisig"
DIGEST = "manifest.sha256"
"""Member with the SHA-256 of the manifest, which shows damage to an unsigned one by a disk or transfer."""
DEVICES = "devices.json"
"""Member with the fingerprints, packages and ledgers of all runs, from the headers of the journals."""
SCHEMA = 1
MOST = 32 * MIB
"""Most bytes of a manifest."""


class ManifestError(ValueError):
    """A manifest cannot be read; the message names the field."""


class ListedMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a package: its size in bytes, and the SHA-256 of its content."""

    name: str
    size: int
    sha256: str


class ListedJournal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A journal in a package: its lines, the last hash of its chain, and the member that holds the chain."""

    name: str
    lines: int
    head: str
    chain: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a package, and the version of accelcheck that packed it.

    `members` has all but the manifest, its signature and its digest, sorted by name, and `missing` the files that the
    journals name and the package lacks.
    """

    schema: int
    accelcheck: str
    journals: tuple[ListedJournal, ...]
    members: tuple[ListedMember, ...]
    missing: tuple[str, ...] = ()


_DECODER = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """Spell a manifest in the one legal way."""
    return (json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n").encode("ascii")


def decode(raw: bytes) -> Manifest:
    """Read a manifest; a `ManifestError` where it is not JSON, of another schema or spelling, or has a wrong field."""
    try:
        manifest = _DECODER.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ManifestError(f"cannot be read: {text(error, 300)}") from error
    if manifest.schema != SCHEMA:
        raise ManifestError(f"schema {manifest.schema}; this accelcheck reads {SCHEMA}")
    if encode(manifest) != raw:
        raise ManifestError("was altered: it is not spelled as accelcheck pack spells it")
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    names = [member.name for member in manifest.members]
    if names != sorted(set(names)) or len(names) > archive.MOST_MEMBERS:
        raise ManifestError("field 'members': expected them sorted by name, each once")
    for member in manifest.members:
        if not archive.legal(member.name) or member.name in {NAME, SIGNATURE, DIGEST}:
            raise ManifestError(f"field 'members': {text(repr(member.name), 120)} is no name of a member")
        if not 0 <= member.size <= archive.MOST_MEMBER:
            raise ManifestError(f"field 'members': {member.name}: a size of {member.size:,} bytes")
    known, taken = set(names), set[str]()
    for journal in manifest.journals:
        for named in (journal.name, journal.chain):
            if named not in known:
                raise ManifestError(f"field 'journals': {text(repr(named), 120)} is not among the members")
            if named in taken:  # a journal that is named often would be read as often
                raise ManifestError(f"field 'journals': {named} is there twice")
            taken.add(named)
    if unread := [name for name in names if name.startswith(("journals/", "chains/")) and name not in taken]:
        raise ManifestError(f"field 'journals': {unread[0]} is among the members and not there: it would not be read")


def places(manifest: Manifest, raw: bytes, signature: int | None) -> dict[int, tuple[str, int]]:
    """Map bytes of the archive to name and size of the member that belongs there.

    `raw` are the manifest's bytes, and `signature` is the signature's size, if there is one.
    """
    order = [(NAME, len(raw))]
    order += [] if signature is None else [(SIGNATURE, signature)]
    order += [(DIGEST, len(digest(raw))), *((member.name, member.size) for member in manifest.members)]
    by_position, position = {}, 0
    for name, size in order:
        by_position[position] = (name, size)
        position += archive.BLOCK + size + -size % archive.BLOCK
    return by_position


def digest(raw: bytes) -> bytes:
    """Make the content of the member `DIGEST`."""
    return hashlib.sha256(raw).hexdigest().encode() + b"\n"
