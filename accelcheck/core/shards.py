"""A part of a selection, for one of several machines: the same part wherever it is asked for. No torch."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from accelcheck.core.case import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from accelcheck.core.case import Mode

T = TypeVar("T")

FORM = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
MOST = 8
"""Missing shards that are named."""
LARGEST = 999_999
LEGAL = f"I/N with 1 <= I <= N <= {LARGEST}, such as 1/4"
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


def absent(selections: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is missing of the selections that journals say they are shards of: a line for each, none where all are whole.

    Args:
        selections: Of the headers of journals that have one device in common; they come from strangers, and what is not a shard in
            them is ignored.
    """
    found: dict[str, tuple[int, set[int]]] = {}
    for selection in selections:
        if (shard := _of(selection)) is not None:
            # A shard is the same whatever the devices of its machine, which may not have all the same.
            rest = sorted((name, repr(value)) for name, value in selection.items() if name not in {"shard", "devices"})
            found.setdefault(repr((shard.of, rest)), (shard.of, set()))[1].add(shard.number)
    lines = []
    for of, numbers in found.values():
        count = of - len(numbers)
        if count:
            first = list(itertools.islice((number for number in range(1, of + 1) if number not in numbers), MOST))
            more = f" and {count - MOST:,} more" if count > MOST else ""
            word = "shard" if count == 1 else "shards"
            lines.append(
                f"incomplete: {word} {', '.join(map(str, first))}{more} of {of:,} missing, and with them their cases"
            )
    return lines


def _of(selection: Mapping[str, Any]) -> Shard | None:
    given = selection.get("shard")
    if not isinstance(given, dict) or not all(type(given.get(name)) is int for name in ("number", "of")):
        return None
    number, of = given["number"], given["of"]
    return Shard(number, of) if 1 <= number <= of <= LARGEST else None
