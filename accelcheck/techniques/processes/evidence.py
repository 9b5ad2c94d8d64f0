"""Parts of techniques that train in other processes: the device, the program there, and evidence that it was right."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence
from accelcheck.devices.base import Device
from accelcheck.workloads.base import Problem, Program


def shareable(device: Device) -> Capability:
    """Tells whether another process can open the device while this one holds it."""
    if not device.shared():
        return unsupported(Code.NO_FEATURE, f"a chip of {device.name} belongs to one process: another cannot open it")
    return SUPPORTED


def program_on(device: Device, problem: Problem, dtype: torch.dtype, seed: int) -> Program:
    """Moves a problem that another process sent to the device; the problem must not be used afterwards."""
    return Program.of(problem, device=device.torch_device(), dtype=dtype, seed=seed, synchronize=device.synchronize)


def unlike(one: Any, other: Any, path: str = "") -> list[str]:
    """Lists the paths at which two states are not bitwise equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(f"{path}[{key!r}]" if path else str(key), one.get(key), other.get(key)) for key in keys]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(f"{path}[{at}]", *both) for at, both in enumerate(zip(one, other, strict=True))]
    else:
        return [] if type(one) is type(other) and one == other else [path]
    return [difference for place, a, b in pairs for difference in unlike(a, b, place)]


def repeated(claim: str, state: Any, straight: Callable[[], Any], device: Device) -> Evidence:
    """Makes evidence that a disturbed training ended in bitwise the same state as an undisturbed one.

    `straight` does an undisturbed training and returns its state: twice where the device may not be deterministic.
    """
    undisturbed = straight()
    differing = unlike(undisturbed, state)
    if differing and not device.has("deterministic") and unlike(undisturbed, straight()):
        return Evidence(claim, "not comparable: two undisturbed trainings differ too", engaged=True)
    return Evidence(claim, f"{len(differing)}, {differing[0]} first" if differing else 0, engaged=not differing)
