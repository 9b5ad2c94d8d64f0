"""Makes plain numbers and texts of values of other packages, which records can hold. No torch."""

import numbers
from collections.abc import Callable
from typing import Any

MOST_TEXT = 2000
"""Longest text that is kept of a technique, a device or an exception, in characters."""
LARGEST = 2**63 - 1
"""Largest magnitude of an integer that every reader of JSON takes."""


def text(value: object, most: int = MOST_TEXT) -> str:
    """The text of anything, cut to `most` characters, with escapes for unprintable characters; it never raises.

    Lone surrogates could not be encoded, and line separators other than a newline would split a line.
    """
    try:
        whole = value if type(value) is str else str(value)
    except Exception as error:  # noqa: BLE001 - `__str__` of others may raise anything
        return f"(no text: {type(error).__name__})"
    kept = whole[:most]
    if not kept.isprintable():
        escaped = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in kept)
        kept = "".join(escaped)
    return kept if len(whole) <= most else f"{kept} ({len(whole) - most} more characters)"


def plain(value: object) -> int | float | str:
    """A number as one of Python's own, also of numpy or a 0-D tensor; the `text` of anything else."""
    try:
        if getattr(value, "shape", None) == ():
            scalar: Any = value
            value = scalar.item()
        if isinstance(value, bool):
            return value
        if isinstance(value, numbers.Integral) and abs(int(value)) <= LARGEST:
            return int(value)
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            return float(value)
    except Exception:  # noqa: BLE001 - numbers of others may raise anything
        return text(value)
    return text(value)


def number(value: object, what: str) -> float:
    """A number, of a 0-D tensor too; the `TypeError` for anything else names `what` it was to be."""
    converted = plain(value)
    if isinstance(converted, str):
        raise TypeError(f"{what}: expected a number, got {type(value).__name__} {converted[:80]}")
    return converted if isinstance(converted, int) else float(converted)


def with_floats(value: Any, change: Callable[[float], Any]) -> Any:
    """A JSON-ready value with its floats changed, at any depth; tuples become lists, and keys texts."""
    if isinstance(value, float):
        return change(value)
    if isinstance(value, dict):
        return {str(key): with_floats(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_floats(item, change) for item in value]
    return value


def truth(value: object, what: str) -> bool:
    """The truth value of anything but a text, which would nearly always be true; an error names `what` it was to be."""
    if isinstance(value, str):
        raise TypeError(f"{what}: expected True or False, got the text {text(value, 80)!r}")
    try:
        return bool(value)
    except Exception as error:
        got = f"{type(value).__name__}: {text(error, 200)}"
        raise TypeError(f"{what}: expected True or False, got {got}") from error
