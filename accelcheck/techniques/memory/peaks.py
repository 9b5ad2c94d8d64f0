"""Peak memory of a program's run, before and after a technique changes it."""

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.measure.memory import Peak, measurable, peak
from accelcheck.workloads.base import Program


def peak_of_run(program: Program, mode: Mode, device: Device) -> Peak:
    """Measures the peak memory of a run in the program's present state. Restores parameters, buffers and CPU generator.

    An unmeasured run goes first, for allocations that are made once, such as library workspaces. If the device cannot
    measure memory, nothing is run, and the result gives the reason.
    """
    if not (known := measurable(device)).ok:
        return Peak(None, known.reason)
    tensors = [*program.module.parameters(), *program.module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]

    def run() -> object:
        program.module.zero_grad(set_to_none=True)
        return program.run(mode)

    with torch.random.fork_rng(devices=[]):
        run()
        program.module.zero_grad(set_to_none=True)  # otherwise the measured run would release gradients
        result = peak(device, run)
    program.module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for tensor, was in zip(tensors, before, strict=True):
            tensor.copy_(was)
    return result


def evidence_of_lower_peak(own: Peak, plain: Peak) -> Evidence:
    """Makes evidence that the own peak is below the plain run's; raises a ValueError if one was not measured."""
    if own.bytes is None or plain.bytes is None:
        raise ValueError(f"expected two measured peaks to compare, got {plain} and {own}")
    claim = f"peak memory of a run, in bytes, < {plain.bytes}, the plain run's"
    return Evidence(claim, own.bytes, engaged=own.bytes < plain.bytes)
