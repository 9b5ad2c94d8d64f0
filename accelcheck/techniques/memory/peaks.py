"""Peak memory of a program's run, before and after a technique changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Evidence
from accelcheck.measure.memory import Peak, measurable, peak

if TYPE_CHECKING:
    from accelcheck.core.case import Mode
    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Program


def peak_of_run(program: Program, mode: Mode, device: Device) -> Peak:
    """Peak memory of one run of the program in its present state. Restores parameters, buffers and the CPU's generator.

    An unmeasured run goes first, for allocations that are made once, such as library workspaces. Where the device cannot
    measure memory, nothing is run, and the result gives the reason.
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
        program.module.zero_grad(set_to_none=True)  # otherwise the measured run would release gradients
        found = peak(device, run)
    program.module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for tensor, was in zip(tensors, before, strict=True):
            tensor.copy_(was)
    return found


def evidence_of_lower_peak(found: Peak, plain: Peak) -> Evidence:
    """Evidence that the peak is below the plain run's.

    Raises:
        ValueError: One of the peaks was not measured.
    """
    if found.bytes is None or plain.bytes is None:
        raise ValueError(f"expected two measured peaks to compare, got {plain} and {found}")
    return Evidence(
        f"peak memory of a run, in bytes, < {plain.bytes}, the plain run's",
        found.bytes,
        engaged=found.bytes < plain.bytes,
    )
