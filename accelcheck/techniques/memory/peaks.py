"""What a program's run takes in memory, before and after a technique changed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Evidence
from accelcheck.measure.memory import Peak, measurable, peak

if TYPE_CHECKING:
    from accelcheck.core.case import Mode
    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Program


def of_run(program: Program, mode: Mode, device: Device) -> Peak:
    """The peak of one run of the program as it is now; afterwards it is as it was, and so is the CPU's generator.

    A run before it allocates what is allocated once: workspaces of libraries, lazily made buffers. Nothing is run where
    the device cannot tell.
    """
    known = measurable(device)
    if not known.ok:
        return Peak(None, known.reason)
    tensors = [*program.module.parameters(), *program.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]

    def run() -> object:
        program.module.zero_grad(set_to_none=True)
        return program.run(mode)

    with torch.random.fork_rng(devices=[]):
        run()
        program.module.zero_grad(set_to_none=True)  # or the measured run would release them
        found = peak(device, run)
    program.module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for tensor, was in zip(tensors, before, strict=True):
            tensor.copy_(was)
    return found


def lower(found: Peak, plain: Peak) -> Evidence:
    """Whether the peak is below the plain run's; both are known."""
    if found.bytes is None or plain.bytes is None:
        raise ValueError(f"expected two known peaks to compare, got {plain} and {found}")
    return Evidence(
        f"peak memory of a run, in bytes, < {plain.bytes}, the plain run's",
        found.bytes,
        engaged=found.bytes < plain.bytes,
    )
