"""Peak memory of a run's tensors: exact on the CPU, from the device's statistics elsewhere."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.layouts import parts


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of a run above what was allocated when it began, in bytes, or the reason why it is unknown."""

    bytes: int | None
    reason: str = ""


def peak(device: Device, run: Callable[[], object]) -> Peak:
    """Run, and return the peak of live memory.

    On the CPU every allocation and release is followed, so the figure is exact. Device statistics also count the
    release of memory that was allocated before: give the run nothing to release, such as gradients.

    The result of `run` is held until the peak has been read. A `RuntimeError` where a profiler is already running.
    """
    if device.has("host"):
        return Peak(_followed(run))
    known = measurable(device)
    if not known.ok:
        return Peak(None, known.reason)
    device.synchronize()
    device.reset_memory()
    before = device.memory().allocated
    held = run()
    device.synchronize()
    after = device.memory()
    del held
    if before is None or after.peak is None:
        raise RuntimeError(f"{device.name}: expected memory statistics as before the run, got {after}")
    return Peak(after.peak - before)


def in_memory(tensor: Tensor) -> int:
    """Bytes of a tensor; for a wrapper of several, such as torchao's, of all of them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return sum(part.nbytes for part in parts(tensor))
    names, _ = flatten()
    return sum(in_memory(getattr(tensor, name)) for name in names)


def held(values: Iterable[Any]) -> int:
    """Bytes of all tensors in nested tuples and lists, such as packed weights."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += in_memory(value)
        elif isinstance(value, (tuple, list)):
            total += held(value)
    return total


def measurable(device: Device) -> Capability:
    """Capability of an open device to give `peak` a number."""
    if device.has("host"):
        return SUPPORTED
    statistics = device.memory()
    if statistics.allocated is None or statistics.peak is None:
        reason = statistics.reason or f"{device.name} offers no memory statistics"
        return unsupported(Code.NO_FEATURE, reason)
    return SUPPORTED


def _followed(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        held = run()
    del held
    recorded: Any = observed.profiler
    events = sorted(_allocations(recorded.kineto_results.experimental_event_tree()), key=lambda event: event[0])
    live: dict[int, int] = {}
    now = most = 0
    for _, pointer, size in events:
        if size > 0:
            live[pointer] = size
            now += size
        else:
            # Allocated before: the profiler reports the release only if an earlier profiler saw the allocation.
            now -= live.pop(pointer, 0)
        most = max(most, now)
    return most


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time in ns, address and size in bytes of every allocation in a tree; releases have negative sizes."""
    for event in events:
        if event.tag == torch_names.EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)
