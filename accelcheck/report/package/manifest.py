"""The list of what is in a package, as JSON by schema. It has one legal spelling, so that any other one is an alteration."""

from __future__ import annotations

import hashlib
import json

import msgspec

from accelcheck.core.bounded import MIB
from accelcheck.core.plain import text
from accelcheck.report.package import archive

NAME = "manifest.json"
SIGNATURE = "manifest.json.minisig"
DIGEST = "manifest.sha256"
"""SHA-256 of the manifest, in hexadecimal digits: finds what a damaged disk or transfer does to an unsigned manifest."""
DEVICES = "devices.json"
"""Fingerprints, packages and ledgers of all runs, as the headers of the journals say."""
SCHEMA = 1
MOST = 32 * MIB
"""Bytes of a manifest."""


class ManifestError(ValueError):
    """A manifest cannot be read; the message names the field."""


class ListedMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a package.

    Attributes:
        name: Of the member.
        size: In bytes.
        sha256: Of its content.
    """

    name: str
    size: int
    sha256: str


class ListedJournal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A journal in a package.

    Attributes:
        name: Of its member.
        lines: How many it has.
        head: Last hash of its chain.
        chain: Name of the member that holds the chain.
    """

    name: str
    lines: int
    head: str
    chain: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a package.

    Attributes:
        schema: Version of this layout.
        accelcheck: Version that packed it.
        journals: Of the package.
        members: All but the manifest, its signature and its digest, sorted by name.
        missing: What the journals name and the package lacks.
    """

    schema: int
    accelcheck: str
    journals: tuple[ListedJournal, ...]
    members: tuple[ListedMember, ...]
    missing: tuple[str, ...] = ()


_DECODER = msgspec.json.Decoder(Manifest)


def encode(manifest: Manifest) -> bytes:
    """The one spelling of a manifest."""
    return (json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n").encode("ascii")


def decode(raw: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        ManifestError: It is not JSON, of another schema, has a wrong field, or another spelling than `encode` gives.
    """
    try:
        found = _DECODER.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ManifestError(f"cannot be read: {text(error, 300)}") from error
    if found.schema != SCHEMA:
        raise ManifestError(f"schema {found.schema}; this accelcheck reads {SCHEMA}")
    if encode(found) != raw:
        raise ManifestError("was altered: it is not spelled as accelcheck pack spells it")
    _check(found)
    return found


def _check(found: Manifest) -> None:
    names = [member.name for member in found.members]
    if names != sorted(set(names)) or len(names) > archive.MOST_MEMBERS:
        raise ManifestError("field 'members': expected them sorted by name, each once")
    for member in found.members:
        if not archive.legal(member.name) or member.name in {NAME, SIGNATURE, DIGEST}:
            raise ManifestError(f"field 'members': {text(repr(member.name), 120)} is no name of a member")
        if not 0 <= member.size <= archive.MOST_MEMBER:
            raise ManifestError(f"field 'members': {member.name}: a size of {member.size:,} bytes")
    known, taken = set(names), set[str]()
    for journal in found.journals:
        for named in (journal.name, journal.chain):
            if named not in known:
                raise ManifestError(f"field 'journals': {text(repr(named), 120)} is not among the members")
            if named in taken:  # one journal, named as often as a manifest has room for, would be read as often
                raise ManifestError(f"field 'journals': {named} is there twice")
            taken.add(named)
    if unread := next(
        (name for name in names if name.startswith(("journals/", "chains/")) and name not in taken), None
    ):
        raise ManifestError(f"field 'journals': {unread} is among the members and not there: it would not be read")


def places(manifest: Manifest, raw: bytes, signature: int | None) -> dict[int, tuple[str, int]]:
    """Name and size of the member that belongs at each byte of the archive.

    Args:
        manifest: Of the package.
        raw: Its bytes.
        signature: Bytes of the signature; None where there is none.
    """
    order = [(NAME, len(raw))]
    order += [] if signature is None else [(SIGNATURE, signature)]
    order += [(DIGEST, len(digest(raw))), *((member.name, member.size) for member in manifest.members)]
    found, position = {}, 0
    for name, size in order:
        found[position] = (name, size)
        position += archive.BLOCK + size + -size % archive.BLOCK
    return found


def digest(raw: bytes) -> bytes:
    """The content of the member `DIGEST`."""
    return hashlib.sha256(raw).hexdigest().encode() + b"\n"
