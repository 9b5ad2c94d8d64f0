"""What commands share: exit codes, kinds of arguments, and whether a device is here. No torch."""

from __future__ import annotations

import argparse
import os

from accelcheck import matrix
from accelcheck.devices import hardware
from accelcheck.devices.probe import probe
from accelcheck.registry import unknown

GREEN, RED, USAGE, NOTHING = 0, 1, 4, 5
"""Exit codes: as pytest has them."""


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return number


def refusal(device: str) -> str | None:
    """Why a device cannot be used here, if it cannot.

    Raises:
        UnknownNameError: There is no such device.
    """
    known = matrix.devices()
    if device not in known:
        raise unknown("device", device, sorted(known))
    if device == "xla" and not hardware.tpu().count:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    statuses, _ = probe([device])
    return None if statuses[device].present else str(statuses[device].capability)
