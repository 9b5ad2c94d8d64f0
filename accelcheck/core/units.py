"""Figures as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size(count: int) -> str:
    """A number of bytes, exactly where it is small."""
    return f"{count} B" if count < 1 << 14 else f"{count / (1 << 20):.4g} MiB"
