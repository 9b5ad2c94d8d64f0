"""Program of each rank of a `RankPool`."""

import datetime as dt
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed

from accelcheck.core import imports
from accelcheck.core.processes import Mailbox
from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.pool import PATIENCE


def main(arguments: Sequence[str]) -> None:
    """Joins the other ranks, then does one job after the other from the mailbox of a folder, until the process ends.

    An exception is reported, and ends the process: the other ranks cannot go on without this one.
    """
    mailbox = Mailbox(Path(arguments[0]))
    rank = int(os.environ["RANK"])
    try:
        imports.load()
        device = joined(mailbox.take("device"))
        mailbox.put(f"pid-{rank}", os.getpid())
        for number in itertools.count():
            answer = mailbox.coming(f"job-{number}").run(device)
            mailbox.put(f"answer-{number}-{rank}", answer)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the pool reports it
        mailbox.raised(rank, error)
        os._exit(1)  # at once: a process group may wait for the others when it is destroyed


def joined(device: Device) -> Device:
    """Opens the device, selects this rank's own chip, and joins all ranks in one process group."""
    device.open()
    if not device.has("host"):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = distributed.get_default_backend_for_device(device.type)
    distributed.init_process_group(backend, timeout=dt.timedelta(seconds=PATIENCE))
    return device
