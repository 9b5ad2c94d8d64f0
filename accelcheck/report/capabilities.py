"""The capability table: every technique, its promise, and each device's answer. Lists and documentation are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.core.case import LEVELS
from accelcheck.core.imports import unknown_device
from accelcheck.core.selection import Selection
from accelcheck.devices import devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.matrix import Matrix

GENERIC = "generic"
"""Name of the column for a device of which only the torch type is known."""


@dataclass(frozen=True)
class TechniqueRow:
    """One technique.

    Attributes:
        name, family, promise, source: As of the `Technique`.
        packages: As `Technique.packages`.
        answers: By device: whether it runs on the device, and if not, why.
        cases: By level: how many of its cases one device has up to that level.
    """

    name: str
    family: str
    promise: str
    source: str
    packages: Mapping[str, str]
    answers: Mapping[str, Capability]
    cases: Mapping[int, int]


def rows(matrix: Matrix, places: Mapping[str, Device]) -> list[TechniqueRow]:
    """The table, sorted by family and name. Devices answer from what they declare; none needs to be present."""
    made = []
    for technique in matrix.techniques.values():
        levels = [
            case.level for case in matrix.cases(Selection(("any",), techniques=(technique.name,), level=max(LEVELS)))
        ]
        made.append(
            TechniqueRow(
                technique.name,
                technique.family,
                technique.promise,
                technique.source,
                technique.packages,
                {name: _answer(technique, device) for name, device in places.items()},
                {level: sum(one <= level for one in levels) for level in LEVELS},
            )
        )
    return sorted(made, key=lambda row: (row.family, row.name))


def _answer(technique: Technique, device: Device) -> Capability:
    """A technique's answer; some techniques need the device to be present."""
    try:
        return technique.answer(device)
    except (
        RuntimeError,
        AssertionError,
        ImportError,
    ):  # torch raises one of these for an accelerator that it does not have
        return unavailable(Code.NOT_ASKED, f"only {device.name} itself can tell", "ask on a machine that has it")


def columns(asked: Sequence[str] = (), extra: Sequence[Device] = ()) -> Mapping[str, Device]:
    """The devices of the table: the selected ones, or all built-in ones, `extra` ones and a generic one.

    Raises:
        UnknownNameError: There is no such device.
    """
    from accelcheck.devices.generic import Generic

    known = {**devices(extra), GENERIC: Generic(GENERIC)}
    for name in asked:
        if name not in known:
            raise unknown_device(name, list(known), "--import")
    return {name: device for name, device in known.items() if not asked or name in asked}
