"""Keeps the last operator that a process began in memory that outlives the process."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcheck.explain.operators import Seen

SIZE = 64 * 1024
"""Bytes of the shared memory; longer descriptions are cut."""
LENGTH = 8
"""Bytes of the length that comes before a description."""


@dataclass(frozen=True)
class Last:
    """The last operator, in words as in a `Culprit`; it has `returned` where the device had done its work."""

    operator: str
    number: int
    place: str
    inputs: tuple[str, ...]
    options: str
    returned: bool = False


class Trail:
    """Description of the running operator, in memory that a process shares with the one that made it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)

    def begin(self, number: int, seen: Seen) -> None:
        """Describe an operator that begins."""
        words = [seen.operator, number, str(seen.place), [str(shape) for shape in seen.inputs], seen.options]
        encoded = json.dumps(words).encode()
        if len(encoded) > SIZE - LENGTH - 1:
            encoded = json.dumps([seen.operator, number, str(seen.place), [], ""]).encode()
        self._memory[LENGTH] = 0
        self._memory[LENGTH + 1 : LENGTH + 1 + len(encoded)] = encoded
        self._memory[:LENGTH] = len(encoded).to_bytes(LENGTH, "little")

    def returned(self) -> None:
        """Note that it has ended."""
        self._memory[LENGTH] = 1

    def clear(self) -> None:
        """Erase the description."""
        self._memory[:LENGTH] = bytes(LENGTH)

    def read(self) -> Last | None:
        """Last operator that began; None where none has."""
        size = int.from_bytes(self._memory[:LENGTH], "little")
        if not size:
            return None
        operator, number, place, inputs, options = json.loads(self._memory[LENGTH + 1 : LENGTH + 1 + size])
        return Last(operator, number, place, tuple(inputs), options, returned=bool(self._memory[LENGTH]))
