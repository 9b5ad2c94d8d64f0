"""What each rank of a `RankPool` runs: ``python -m accelcheck.techniques.distributed.pool_rank FOLDER``, started by torchrun."""

from __future__ import annotations

import datetime as dt
import faulthandler
import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed

from accelcheck.techniques.distributed.pool import PATIENCE, PoolMailbox
from accelcheck.techniques.processes.torchrun import leave_with_parent, looks, put, take

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


def main(mailbox: PoolMailbox) -> None:
    """Join the other ranks, then do the jobs that come, one after the other. It ends with the process.

    A job that raises ends it, after it was told: the others cannot go on without this rank.
    """
    faulthandler.enable()
    leave_with_parent()
    rank = int(os.environ["RANK"])
    try:
        device = _joined(take(mailbox.device))
        put(mailbox.here(rank), os.getpid())
        for number in itertools.count():
            job = mailbox.job(number)
            for _ in looks(float("inf")):
                if job.exists():
                    break
            put(mailbox.answer(number, rank), take(job).run(device))
    except BaseException as error:  # noqa: BLE001 - whatever it is, who gave the job is told
        put(mailbox.trouble(rank), (f"{type(error).__name__}: {error}", traceback.format_exc()))
        os._exit(1)  # at once: a process group may wait for the others when it is taken down


def _joined(device: Device) -> Device:
    """The device, ready, with this rank's own chip chosen, and all ranks in one process group."""
    device.open()
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = distributed.get_default_backend_for_device(device.type)
    distributed.init_process_group(backend, timeout=dt.timedelta(seconds=PATIENCE))
    return device


if __name__ == "__main__":
    main(PoolMailbox(Path(sys.argv[1])))
