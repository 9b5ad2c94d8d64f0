"""Divides a selection among several machines, in the same way on each. No torch."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from accelcheck.core.case import WEIGHTS, Mode

T = TypeVar("T")

FORM = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")
MOST = 8
"""Largest number of missing shards that are named."""
LARGEST = 999_999
LEGAL = f"I/N with 1 <= I <= N <= {LARGEST}, such as 1/4"
"""The form of a shard, for people."""


@dataclass(frozen=True)
class Shard:
    """One of several parts of equal size, by its number, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        """The form of the command line: ``2/4``."""
        return f"{self.number}/{self.of}"

    @classmethod
    def parse(cls, word: str) -> Self | None:
        """The shard that a user wrote; None where it is not of the form `LEGAL`."""
        match = FORM.fullmatch(word)
        if match is None:
            return None
        number, of = map(int, match.groups())
        return cls(number, of) if number <= of else None

    def take(self, cells: Sequence[T], mode: Callable[[T], Mode]) -> list[T]:
        """This shard of some cells, in their order.

        Cells are dealt one by one, those of the costliest mode first. So the sizes of shards differ by at most one
        cell, their weights by at most that of one cell; cells of one technique, which are neighbours, are spread.
        """
        modes = [mode(cell) for cell in cells]
        order = sorted(range(len(cells)), key=lambda place: (-WEIGHTS.get(modes[place], 1), modes[place], place))
        return [cells[place] for place in sorted(order[self.number - 1 :: self.of])]


def absent(selections: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each selection of which journals lack shards.

    The selections are of headers of untrusted journals that have one device in common; malformed shards are ignored.
    """
    present: dict[str, tuple[int, set[int]]] = {}
    for selection in selections:
        if (shard := _of(selection)) is not None:
            # Devices are left out: a shard is the same on machines with different devices.
            rest = sorted((name, repr(value)) for name, value in selection.items() if name not in {"shard", "devices"})
            present.setdefault(repr((shard.of, rest)), (shard.of, set()))[1].add(shard.number)
    lines = []
    for of, numbers in present.values():
        if count := of - len(numbers):
            first = itertools.islice((number for number in range(1, of + 1) if number not in numbers), MOST)
            named = ", ".join(map(str, first)) + (f" and {count - MOST:,} more" if count > MOST else "")
            word = "shard" if count == 1 else "shards"
            lines.append(f"incomplete: {word} {named} of {of:,} missing, and with them their cases")
    return lines


def _of(selection: Mapping[str, Any]) -> Shard | None:
    fields = selection.get("shard")
    if not isinstance(fields, dict) or not all(type(fields.get(name)) is int for name in ("number", "of")):
        return None
    number, of = fields["number"], fields["of"]
    return Shard(number, of) if 1 <= number <= of <= LARGEST else None
