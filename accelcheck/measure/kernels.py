"""What one call launches: kernels on an accelerator, operators on the CPU; and its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._C._autograd import DeviceType  # where torch.autograd has it from
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from accelcheck.devices.base import Device


@dataclass(frozen=True, slots=True)
class Launches:
    """What a call started.

    Attributes:
        count: Kernels of the device; on the CPU, and where the profiler sees no device, operators that no other one called.
        seconds: What they took, all together; None where only operators were seen.
    """

    count: int
    seconds: float | None


def launches(device: Device, call: Callable[[], object], trace: Path | None = None) -> Launches:
    """Profile one call.

    Args:
        device: Open.
        call: Warm: its first calls may compile.
        trace: File for the trace, in Chrome's format; its folder exists.

    Raises:
        RuntimeError: A profiler runs already.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    device.synchronize()
    with profile(activities=activities) as observed:
        held = call()
        device.synchronize()
    del held
    if trace is not None:
        observed.export_chrome_trace(str(trace))
    return _counted(observed.events() or ())


def _counted(events: Iterable[Any]) -> Launches:
    kernels = [event for event in events if event.device_type != DeviceType.CPU]
    if kernels:
        return Launches(len(kernels), sum(event.self_device_time_total for event in kernels) / 1e6)
    return Launches(sum(_operator(event) and not _within_operator(event) for event in events), None)


def _operator(event: Any) -> bool:
    # Operators have a namespace; what else is recorded are ranges (``Torch-Compiled Region``, ``## Call CompiledFxGraph``).
    return "::" in event.name and " " not in event.name


def _within_operator(event: Any) -> bool:
    above = event.cpu_parent
    while above is not None:
        if _operator(above):
            return True
        above = above.cpu_parent
    return False
