"""The most memory that a run's tensors take at once: to the byte on the CPU, by the device's statistics elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accelcheck.devices.base import Device


@dataclass(frozen=True, slots=True)
class Peak:
    """What a run took at most, above what was there when it began: a number of bytes, or the reason why it is not known.

    Attributes:
        bytes: Of live tensors; None where it is not known, never a 0 that means so.
        reason: Why not; empty where it is known.
    """

    bytes: int | None
    reason: str = ""


def peak(device: Device, run: Callable[[], object]) -> Peak:
    """Run, and tell how much memory was live at once.

    On the CPU every allocation and release is followed: exact, and the same every time. What was there before and is
    released by the run does not count, so give it nothing to release (gradients, for one): device statistics do count it.

    Args:
        device: Open.
        run: Not called where the device cannot tell. What it returns is held until it has ended.

    Raises:
        RuntimeError: A profiler runs already.
    """
    if device.type == "cpu":
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
        raise RuntimeError(f"{device.name}: expected memory statistics, as it gave before the run; got {after}")
    return Peak(after.peak - before)


def in_memory(tensor: Tensor) -> int:
    """Bytes that a tensor holds; of a wrapper of several tensors (torchao's are such), the bytes of all of them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    names, _ = flatten()
    return sum(in_memory(getattr(tensor, name)) for name in names)


def held(values: Iterable[Any]) -> int:
    """Bytes of tensors, wherever in nested tuples and lists they are: packed weights are such."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += in_memory(value)
        elif isinstance(value, (tuple, list)):
            total += held(value)
    return total


def measurable(device: Device) -> Capability:
    """Whether `peak` has a number there. Asked of an open device."""
    if device.type == "cpu":
        return SUPPORTED
    found = device.memory()
    if found.allocated is None or found.peak is None:
        reason = found.reason or f"{device.name} offers no memory statistics"
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
            # What was allocated before: the profiler reports it if an earlier one saw it come, and only then.
            now -= live.pop(pointer, 0)
        most = max(most, now)
    return most


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Time in ns, address and size in bytes of every allocation in a tree; a release has its size negated."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _allocations(event.children)
