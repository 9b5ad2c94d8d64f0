"""Launches of a call: kernels on an accelerator, operators on the CPU; and its trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import DeviceType

LISTED = 4
"""Largest number of listed names, the most frequent first; the trace has all."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of a call.

    Attributes:
        names: Number of launches by name: kernels of the device; on the CPU, and where the profiler sees no device,
            operators that no other operator called.
        seconds: Total time of the kernels; None for operators.
        others: Number of other events, such as ranges of compiled code on the CPU, whose loops are no operators.
    """

    names: Mapping[str, int]
    seconds: float | None
    others: int = field(default=0, compare=False)

    @property
    def count(self) -> int:
        """Number of launches."""
        return sum(self.names.values())

    @property
    def nothing(self) -> bool:
        """True if a profiler saw neither launches nor any other event."""
        return not self.names and not self.others

    def instead_of(self, other: Launches) -> str:
        """The difference to other launches by name, in words; empty if both are the same."""
        gone, come = Counter(other.names), Counter(self.names)
        if gone == come:
            return ""
        return f"{_listed(come - gone)} in place of {_listed(gone - come)}"


def activities(device_type: str) -> list[ProfilerActivity]:
    """Activities in which torch.profiler records operators, and the kernels of a device type where it can."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]


def launches(device: Device, call: Callable[[], object], trace: Path | None = None) -> Launches:
    """Profile one call that has run before, since first calls may compile; `trace` is a file in Chrome's format.

    A `RuntimeError` where a profiler is already running.
    """
    device.synchronize()
    with profile(activities=activities(device.type)) as observed:
        held = call()
        device.synchronize()
    del held
    if trace is not None:
        observed.export_chrome_trace(str(trace))
    return _counted(observed.events() or ())


def _counted(events: Iterable[Any]) -> Launches:
    # A range of `record_function` is on the device's timeline too, over its kernels; torch's totals leave it out.
    every = list(events)
    kernels = [event for event in every if event.device_type != DeviceType.CPU and not event.is_user_annotation]
    if kernels:
        return Launches(_counts(kernels), sum(event.self_device_time_total for event in kernels) / 1e6)
    ranges = sum(not _operator(event) for event in every)
    return Launches(_counts(event for event in every if _operator(event) and not _within_operator(event)), None, ranges)


def _counts(events: Iterable[Any]) -> dict[str, int]:
    # Only the function: template arguments and parameters of a kernel's name take hundreds of characters.
    return dict(Counter(re.split(r"[<(]", event.name.removeprefix("void "), maxsplit=1)[0] for event in events))


def _listed(names: Counter[str]) -> str:
    parts = [f"{count} {name}" for name, count in names.most_common(LISTED)]
    if other := names.total() - sum(count for _, count in names.most_common(LISTED)):
        parts.append(f"{other} other")
    return ", ".join(parts) or "nothing"


def _operator(event: Any) -> bool:
    # Operators have a namespace; other events are ranges (``Torch-Compiled Region``, ``## Call CompiledFxGraph``).
    return "::" in event.name and " " not in event.name


def _within_operator(event: Any) -> bool:
    above = event.cpu_parent
    return above is not None and (_operator(above) or _within_operator(above))
