"""Formats times and sizes in units that are easy to read."""


def duration(seconds: float) -> str:
    """A time in s, ms, us or ns, with three significant digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def size(count: int) -> str:
    """A number of bytes; in MiB from 16 KiB on."""
    return f"{count} B" if count < 1 << 14 else f"{count / (1 << 20):.4g} MiB"
