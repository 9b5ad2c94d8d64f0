"""``torchrun``: real processes on this machine, started as users start them."""

import os
from collections.abc import Mapping, Sequence

import torch

from accelcheck.core.processes import Child, calling
from accelcheck.devices.base import Device
from accelcheck.devices.pinning import callers, callers_count


def devices_of_ranks(device: Device) -> int:
    """Counts the devices of this type that ranks see: those of this process or, where it is a worker, its caller's."""
    here = int(torch.get_device_module(device.type).device_count())
    return max(here, callers_count(device.name, os.environ))


def torchrun(
    options: Sequence[str], function: str, arguments: Sequence[object] = (), environ: Mapping[str, str] | None = None
) -> Child:
    """Starts torchrun under this Python. It and its ranks end with this process, and its ranks end with it.

    Each rank calls ``package.module:name`` with a list of texts; `environ` adds variables to those of this process.
    Ranks see the devices that the caller of this run sees, even if this process is a worker with one of them.
    """
    words = [*options, *calling(function, *arguments)]
    settings = {"OMP_NUM_THREADS": "1", **callers(os.environ), **(environ or {})}
    return Child(calling("torch.distributed.run:main", *words, parent=True), settings)
