"""The capability table behind lists and documentation: every technique, its promise, and each device's answer."""

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
    """One technique, with each device's answer (support, or the reason against it) and its cases up to each level."""

    name: str
    family: str
    promise: str
    source: str
    packages: Mapping[str, str]
    answers: Mapping[str, Capability]
    cases: Mapping[int, int]


def rows(matrix: Matrix, places: Mapping[str, Device]) -> list[TechniqueRow]:
    """Make the table, sorted by family and name, from the devices' declarations; none needs to be present."""
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
                {level: sum(case_level <= level for case_level in levels) for level in LEVELS},
            )
        )
    return sorted(made, key=lambda row: (row.family, row.name))


def _answer(technique: Technique, device: Device) -> Capability:
    """Ask a technique; some techniques need the device to be present."""
    try:
        return technique.answer(device)
    except (RuntimeError, AssertionError, ImportError):  # torch raises one of these without the accelerator
        return unavailable(Code.NOT_ASKED, f"only {device.name} itself can tell", "ask on a machine that has it")


def columns(asked: Sequence[str] = (), extra: Sequence[Device] = ()) -> Mapping[str, Device]:
    """Devices of the table: the selected ones, or all built-in ones, `extra` ones and a generic one.

    Raises:
        UnknownNameError: There is no such device.
    """
    from accelcheck.devices.generic import Generic

    known = {**devices(extra), GENERIC: Generic(GENERIC)}
    for name in asked:
        if name not in known:
            raise unknown_device(name, list(known), "--import")
    return {name: device for name, device in known.items() if not asked or name in asked}
