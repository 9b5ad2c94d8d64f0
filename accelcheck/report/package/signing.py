"""Signs manifests, and checks signatures, as minisign does (Ed25519 over BLAKE2b), by py-minisign."""

import importlib
import sys
from pathlib import Path
from typing import Any

from accelcheck.core import bounded
from accelcheck.core.errors import InputError
from accelcheck.core.plain import text

INSTALL = "pip install 'accelcheck[sign]'"
COMMENT = "signature of an accelcheck package"
"""Comment that no signature covers; another one is an alteration."""
MOST = 64 * 1024
"""Most bytes of a key or a signature."""


class SigningError(InputError):
    """A manifest cannot be signed, or a key cannot be read; the message names a remedy."""


def available() -> str:
    """Command that installs py-minisign; empty where it is there."""
    try:
        importlib.import_module("minisign")
    except ImportError:
        return INSTALL
    return ""


def sign(manifest: bytes, key: Path) -> bytes:
    """Sign the bytes of a manifest with a secret key of ``minisign -G``; the signature has the same bytes each time.

    The password of the key is asked for on a terminal. A `SigningError` where py-minisign is not installed, or the key
    cannot be read.
    """
    minisign = _library()
    try:
        with minisign.SecretKey.from_bytes(_read(key)) as secret:
            if secret.is_encrypted():
                secret.decrypt(_password(key))
            made = secret.sign(manifest, untrusted_comment=COMMENT, trusted_comment="accelcheck manifest.json")
    except minisign.Error as error:
        raise SigningError(f"{key}: {error}; expected a secret key as minisign -G writes it") from error
    return bytes(made) + b"\n"


def public_key(path: Path) -> Any:
    """Read a key that checks signatures; a `SigningError` where it cannot be read, or py-minisign is not installed."""
    minisign = _library()
    try:
        return minisign.PublicKey.from_bytes(_read(path))
    except minisign.Error as error:
        raise SigningError(f"{path}: {error}; expected a public key as minisign -G writes it") from error


def check(manifest: bytes, signature: bytes, public: Any) -> str:
    """Find the fault of a signature, which may be any bytes; empty where it holds. `public` is a `public_key`."""
    minisign = _library()
    try:
        parsed = minisign.Signature.from_bytes(signature)
        public.verify(manifest, parsed)
        if bytes(parsed) + b"\n" != signature or parsed.untrusted_comment != COMMENT:
            return "its spelling was altered"
    except (ValueError, UnicodeError) as error:
        return text(error, 200)
    return ""


def _library() -> Any:
    if missing := available():
        raise SigningError(f"signatures need py-minisign, which is not installed: {missing}")
    return importlib.import_module("minisign")


def _read(key: Path) -> bytes:
    try:
        return bounded.read(key, MOST)
    except bounded.UnreadableFileError as error:
        raise SigningError(f"the key {error}") from error


def _password(key: Path) -> str:
    import getpass

    if not sys.stdin.isatty():
        raise SigningError(
            f"{key} has a password, and there is no terminal to ask for it: minisign -G -W makes a key without one"
        )
    return getpass.getpass(f"Password of {key}: ")
