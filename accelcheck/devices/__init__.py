"""The devices under test: one file each, and one generic for any other torch accelerator.

No module here imports torch at its top: nox, the plugin's controller and the probe's parent read them without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from accelcheck.core.registry import discover, index

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


def devices(found: Iterable[Device] = ()) -> Mapping[str, Device]:
    """All known devices by name: the built-in ones and `found` (generic accelerators, other plugins')."""
    return index("device", [*discover("accelcheck.devices", "DEVICES"), *found])
