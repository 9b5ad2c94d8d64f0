"""A part of a selection, for one of several machines: the same part wherever it is asked for. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from accelcheck.core.case import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelcheck.core.case import Mode

T = TypeVar("T")

FORM = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
LEGAL = "I/N with 1 <= I <= N <= 999999, such as 1/4"
"""The form of a shard, for people."""


@dataclass(frozen=True)
class Shard:
    """One of several parts of equal size.

    Attributes:
        number: Which, from 1 on.
        of: How many there are.
    """

    number: int
    of: int

    def __str__(self) -> str:
        """As on the command line: ``2/4``."""
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, word: str) -> Self | None:
        """Read what a user wrote; None where it is not of the form `LEGAL`."""
        found = FORM.fullmatch(word)
        if found is None:
            return None
        number, of = map(int, found.groups())
        return cls(number, of) if number <= of else None

    def take(self, cells: Sequence[T], mode: Callable[[T], Mode]) -> list[T]:
        """This shard of some cells, in their order.

        They are dealt one by one, those of the mode that takes longest first. So shards differ by at most one cell in
        number, and their weights by at most that of one cell; cells of one technique, which are neighbours, are spread.
        """
        modes = [mode(cell) for cell in cells]
        order = sorted(range(len(cells)), key=lambda place: (-WEIGHTS.get(modes[place], 1), modes[place], place))
        return [cells[place] for place in sorted(order[self.number - 1 :: self.of])]
