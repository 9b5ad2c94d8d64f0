"""The configuration of a run: what ledgers learn of its devices."""

from __future__ import annotations

from accelcheck.core.capability import SUPPORTED
from accelcheck.devices.base import Fingerprint, Status
from accelcheck.plugin.configuration import chips


def test_ledgers_see_the_runtime_of_a_chip() -> None:
    place = Fingerprint("cpu", "AMD EPYC", 2, 0, "", "ATen AVX2", {}, {})
    other = Fingerprint("new", "Chip", 1, 0, "", "", {}, {})
    statuses = {
        "cpu": Status("cpu", SUPPORTED, place),
        "new": Status("new", SUPPORTED, other),
        "gone": Status("gone", SUPPORTED),
    }
    assert chips(statuses) == {"cpu": "AMD EPYC, ATen AVX2", "new": "Chip"}
