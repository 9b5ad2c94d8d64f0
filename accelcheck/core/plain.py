"""Plain numbers and texts of whatever others hand over, so that records of it can be written, sent and read. No torch."""

from __future__ import annotations

import numbers
from typing import Any

MOST_TEXT = 2000
"""Characters that are kept of a text that a technique, a device or an exception gives."""
LARGEST = 2**63 - 1
"""Largest magnitude of an integer that every reader of JSON takes."""


def text(value: object, most: int = MOST_TEXT) -> str:
    """The text of anything, cut to `most` characters, with escapes for what cannot be printed; it never raises.

    Lone surrogates could not be encoded, and other line separators than a newline would make a line two.
    """
    try:
        found = value if type(value) is str else str(value)
    except Exception as error:  # noqa: BLE001 - `__str__` of others may raise anything
        return f"(no text: {type(error).__name__})"
    kept = found[:most]
    if not kept.isprintable():
        kept = "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in kept)
    return kept if len(found) <= most else f"{kept} ({len(found) - most} more characters)"


def plain(value: object) -> int | float | str:
    """A number as one of Python's own, also of numpy or a 0-D tensor; the `text` of anything else."""
    try:
        if getattr(value, "shape", None) == ():
            found: Any = value
            value = found.item()
        if isinstance(value, bool):
            return value
        if isinstance(value, numbers.Integral) and abs(int(value)) <= LARGEST:
            return int(value)
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            return float(value)
    except Exception:  # noqa: BLE001 - what others made of numbers may raise anything, and is then shown as text
        return text(value)
    return text(value)


def number(value: object, what: str) -> float:
    """A number, of a 0-D tensor too.

    Raises:
        TypeError: It is none; the message names `what` it was to be.
    """
    found = plain(value)
    if isinstance(found, str):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__} {found[:80]}")
    return found if isinstance(found, int) else float(found)


def truth(value: object, what: str) -> bool:
    """Whether Python takes a value as true. Any text would be, and so is refused.

    Raises:
        TypeError: It cannot be told; the message names `what` it was to be.
    """
    if not isinstance(value, str):
        try:
            return bool(value)
        except Exception as error:
            raise TypeError(
                f"{what}: expected True or False, got {type(value).__name__}: {text(error, 200)}"
            ) from error
    raise TypeError(f"{what}: expected True or False, got the text {text(value, 80)!r}")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
