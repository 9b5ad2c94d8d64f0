"""The last operator that a process began, in memory that outlives it: what a crash or a hang leaves behind."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcheck.explain.operators import Seen

SIZE = 64 * 1024
"""Bytes of the memory that the processes share; longer descriptions are cut."""
LENGTH = 8
"""Bytes at its beginning that say how long the description is."""


@dataclass(frozen=True)
class Last:
    """The operator that ran last.

    Attributes:
        operator: Name with namespace and overload, such as ``aten::mm``.
        number: Position among the operators of the run, from 0.
        place: Where the model calls it.
        inputs: Of its tensors, in order, as text.
        options: Its other arguments, as text.
        returned: Whether it had returned, and the device had done its work.
    """

    operator: str
    number: int
    place: str
    inputs: tuple[str, ...]
    options: str
    returned: bool = False


class Trail:
    """Written by a process that runs operators, and read by the one that made it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)

    def begin(self, number: int, seen: Seen) -> None:
        """An operator begins."""
        words = [seen.operator, number, str(seen.place), [str(one) for one in seen.inputs], seen.options]
        said = json.dumps(words).encode()
        if len(said) > SIZE - LENGTH - 1:
            said = json.dumps([seen.operator, number, str(seen.place), [], ""]).encode()
        self._memory[LENGTH] = 0
        self._memory[LENGTH + 1 : LENGTH + 1 + len(said)] = said
        self._memory[:LENGTH] = len(said).to_bytes(LENGTH, "little")

    def returned(self) -> None:
        """It has ended."""
        self._memory[LENGTH] = 1

    def clear(self) -> None:
        """Forget what was written."""
        self._memory[:LENGTH] = bytes(LENGTH)

    def read(self) -> Last | None:
        """The last operator that began; None where none has."""
        size = int.from_bytes(self._memory[:LENGTH], "little")
        if not size:
            return None
        operator, number, place, inputs, options = json.loads(self._memory[LENGTH + 1 : LENGTH + 1 + size])
        return Last(operator, number, place, tuple(inputs), options, returned=bool(self._memory[LENGTH]))
