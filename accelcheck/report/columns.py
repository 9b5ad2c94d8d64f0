"""Lines of aligned columns. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, every column as wide as its widest text.

    Args:
        rows: Of the same number of columns.
        right: Columns that are aligned to the right, by index.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return [
        "  ".join(pad(text, width) for pad, text, width in zip(padded, row, widths, strict=True)).rstrip()
        for row in rows
    ]
